"""impl="torch_compile": logits in memory, compiled by torch.compile. The fast and memory-hungry reference."""

import functools

import torch
import torch.nn.functional as F

from cce.targets import IGNORED
from cce.vocab_parallel import VocabParallelOptions, combine_parts, reduce_e_grad


def _logits(e_ND, c_VD, bias_V, softcap):
    z_NV = e_ND @ c_VD.t()
    if bias_V is not None:
        z_NV = z_NV + bias_V
    if softcap is not None:
        z_NV = softcap * torch.tanh(z_NV / softcap)
    return z_NV.to(torch.promote_types(z_NV.dtype, torch.float32))


def _losses(e_ND, c_VD, bias_V, targets_N, softcap, label_smoothing, with_lse):
    z_NV = _logits(e_ND, c_VD, bias_V, softcap)
    loss_N = F.cross_entropy(z_NV, targets_N, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing)
    return loss_N, z_NV.logsumexp(1).masked_fill(targets_N == IGNORED, 0) if with_lse else None


def _shard_parts(e_ND, c_VD, bias_V, codes_N, softcap):
    """(log-sum-exp over the classes that are not the target, the target's logit or 0) of this rank's classes."""
    z_NV = _logits(e_ND, c_VD, bias_V, softcap)
    own_NV = torch.arange(c_VD.shape[0], device=e_ND.device) == codes_N[:, None]
    return z_NV.masked_fill(own_NV, -torch.inf).logsumexp(1), z_NV.masked_fill(~own_NV, 0).sum(1)


class _Combine(torch.autograd.Function):
    """(loss, lse) of the whole vocabulary from this rank's parts."""

    @staticmethod
    def forward(ctx, rest_N, target_N, codes_N, group):
        total_N, target_N = combine_parts(rest_N, target_N, codes_N, group)
        loss_N = torch.logaddexp(total_N - target_N, torch.zeros_like(total_N))
        lse_N = torch.logaddexp(total_N, target_N)
        ctx.save_for_backward(rest_N, loss_N, lse_N)
        return loss_N, lse_N

    @staticmethod
    def backward(ctx, dloss_N, dlse_N):
        rest_N, loss_N, lse_N = ctx.saved_tensors
        drest_N = (rest_N - lse_N).exp() * (dloss_N + dlse_N)
        return drest_N, torch.expm1(-loss_N) * dloss_N + torch.exp(-loss_N) * dlse_N, None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e_ND, group):
        ctx.group = group
        return e_ND.view_as(e_ND)

    @staticmethod
    def backward(ctx, de_ND):
        return reduce_e_grad(de_ND, ctx.group), None


@functools.cache
def _compiled(function):
    return torch.compile(function, fullgraph=True)


def token_losses(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    softcap: float | None,
    label_smoothing: float,
    with_lse: bool,
    shard: VocabParallelOptions | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """loss [N] and, if asked, lse [N] in fp32; ignored tokens are 0."""
    if shard is None:
        return _compiled(_losses)(e_ND, c_VD, bias_V, codes_N.long(), softcap, label_smoothing, with_lse)
    if shard.reduce_e_grad:
        e_ND = _SumGradient.apply(e_ND, shard.group)
    rest_N, target_N = _compiled(_shard_parts)(e_ND, c_VD, bias_V, codes_N, softcap)
    loss_N, lse_N = _Combine.apply(rest_N, target_N, codes_N, shard.group)
    ignored_N = codes_N == IGNORED
    return loss_N.masked_fill(ignored_N, 0), lse_N.masked_fill(ignored_N, 0)
