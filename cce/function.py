"""The autograd functions: TokenLosses by slices of the vocabulary, SummedLoss in one pass; cce/plans.py says which."""

import operator

import torch

from cce.operators import (
    backward_op,
    backward_parts,
    called,
    forward_op,
    forward_parts,
    one_pass,
    one_pass_op,
    runs_kernels,
    tile_maxima_like,
)
from cce.plans import Sum, one_pass_chunk
from cce.presets import GradientMode
from cce.targets import IGNORED
from cce.tiles import architecture
from cce.vocab_parallel import VocabParallelOptions, combine_parts, reduce_e_grad


def chunk_of_tokens(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    dtype: torch.dtype,
    mode: GradientMode,
    workspace_mib: float | None,
) -> tuple[int, Sum] | None:
    """(tokens of a chunk, how dC's sum is kept) for `one_pass`, or None where the gradients are to be made by slices in the backward pass.

    One pass has kernels for products in bf16 and for gradients of e and c that nothing is left out of.
    """
    wanted = torch.is_grad_enabled() and (e_ND.requires_grad or c_VD.requires_grad)
    of_bias = bias_V is not None and bias_V.requires_grad
    if not wanted or of_bias or dtype != torch.bfloat16 or not runs_kernels(e_ND) or e_ND.shape[0] == 0:
        return None
    # A plain sum of dC over chunks would lose what one product by slices keeps, and what registers sum is not plain.
    if mode.filter_eps is not None or mode.accumulation == "plain":
        return None
    return _chosen(
        *(operator.index(size) for size in (*e_ND.shape, c_VD.shape[0])),
        mode.accumulation,
        workspace_mib,
        (e_ND.requires_grad, c_VD.requires_grad),
        architecture(e_ND.device, dtype),
    )


# torch.compile takes the answer for a constant of the shape, a compilation a shape, instead of tracing how it comes about.
@torch.compiler.assume_constant_result
def _chosen(*of) -> tuple[int, Sum] | None:
    return one_pass_chunk(*of)


class _Once(torch.autograd.Function):
    """A gradient as a function of the inputs, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx, gradient, *inputs):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "linear_cross_entropy is differentiable once: its gradients cannot be differentiated again. "
            "Use F.cross_entropy on logits for second derivatives."
        )


def _once(ctx, gradients, *upstream):
    """The gradients of a backward pass; under create_graph=True such that differentiating them says why it cannot be."""
    if not torch.is_grad_enabled():
        return gradients
    inputs = (*ctx.saved_tensors[:3], *upstream)  # a second look: activation checkpointing allows one
    return [None if gradient is None else _Once.apply(gradient, *inputs) for gradient in gradients]


class TokenLosses(torch.autograd.Function):
    """loss [N], and lse [N] if asked, in fp32 (fp64 for fp64); ignored tokens are 0 and get no gradient."""

    @staticmethod
    def forward(
        ctx,
        e_ND: torch.Tensor,
        c_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        codes_N: torch.Tensor,
        dtype: torch.dtype,
        softcap: float | None,
        label_smoothing: float,
        with_lse: bool,
        mode: tuple,
        workspace_mib: float | None,
        shard: VocabParallelOptions | None,
    ):
        ctx.dtypes = (e_ND.dtype, c_VD.dtype, None if bias_V is None else bias_V.dtype)
        ctx.options = (softcap, label_smoothing, *mode, workspace_mib)
        ctx.shard = shard
        e_ND, c_VD = e_ND.to(dtype), c_VD.to(dtype)
        _, filter_e, filter_c, _ = mode
        rest_N, target_N, mean_N, maxima = called(forward_parts, forward_op)(
            e_ND, c_VD, bias_V, codes_N, softcap, label_smoothing > 0,
            (filter_e and ctx.needs_input_grad[0]) or (filter_c and ctx.needs_input_grad[1]),
        )  # fmt: skip
        if shard is not None:
            rest_N, target_N = combine_parts(rest_N, target_N, codes_N, shard.group)
        # -log p(target) = log(1 + exp(rest - target)) keeps its relative precision when p is close to 1.
        ignored_N = codes_N == IGNORED
        nll_N = torch.logaddexp(rest_N - target_N, torch.zeros_like(rest_N)).masked_fill(ignored_N, 0)
        lse_N = torch.logaddexp(rest_N, target_N).masked_fill(ignored_N, 0)
        ctx.save_for_backward(e_ND, c_VD, bias_V, codes_N, lse_N, nll_N, maxima)
        loss_N = nll_N.clone()
        if label_smoothing > 0:
            loss_N += label_smoothing * (target_N - mean_N).masked_fill(ignored_N, 0)
        return (loss_N, lse_N.clone()) if with_lse else loss_N

    @staticmethod
    def backward(ctx, dloss_N, dlse_N=None):
        with torch.no_grad():
            gradients = TokenLosses._gradients(ctx, dloss_N, dlse_N)
        return (*_once(ctx, gradients, dloss_N, dlse_N), *[None] * 8)

    @staticmethod
    def _gradients(ctx, dloss_N, dlse_N):
        e_ND, c_VD, bias_V, codes_N, lse_N, nll_N, maxima = ctx.saved_tensors
        softcap, label_smoothing, filter_eps, filter_e, filter_c, accumulation, workspace_mib = ctx.options
        needs = ctx.needs_input_grad[:3]
        de_ND, dc_VD, dbias_V = called(backward_parts, backward_op)(
            e_ND, c_VD, bias_V, codes_N, lse_N, nll_N, maxima, dloss_N.contiguous(),
            None if dlse_N is None else dlse_N.contiguous(), softcap, label_smoothing,
            filter_eps, filter_e, filter_c, accumulation, workspace_mib, list(needs), ctx.dtypes[0], ctx.dtypes[1],
        )  # fmt: skip
        if needs[0] and ctx.shard is not None and ctx.shard.reduce_e_grad:
            de_ND = reduce_e_grad(de_ND, ctx.shard.group)
        return (
            de_ND if needs[0] else None,
            dc_VD if needs[1] else None,
            dbias_V.to(ctx.dtypes[2]) if needs[2] else None,
        )


class SummedLoss(torch.autograd.Function):
    """weight * sum(nll + z_loss lse^2) with its gradients made in the forward pass (cce/kernels/one_pass.py); fp32 scalar.

    The upstream gradient multiplies them in place, once. A second backward pass over the same graph makes them anew, by slices.
    """

    @staticmethod
    def forward(
        ctx,
        e_ND: torch.Tensor,
        c_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        codes_N: torch.Tensor,
        weight: torch.Tensor,
        dtype: torch.dtype,
        softcap: float | None,
        z_loss: float,
        mode: tuple,
        workspace_mib: float | None,
        chunk: tuple[int, Sum],
    ):
        ctx.dtypes = (e_ND.dtype, c_VD.dtype)
        ctx.options = (softcap, z_loss, *mode, workspace_mib)
        e_ND, c_VD = e_ND.to(dtype), c_VD.to(dtype)
        nll_N, lse_N, de_ND, dc_VD = called(one_pass, one_pass_op)(
            e_ND, c_VD, bias_V, codes_N, weight, softcap, z_loss, *chunk,
            ctx.needs_input_grad[0], ctx.needs_input_grad[1], *ctx.dtypes,
        )  # fmt: skip
        ctx.save_for_backward(e_ND, c_VD, bias_V, codes_N, weight, lse_N, nll_N, de_ND, dc_VD)
        ctx.spent = False
        loss = nll_N.sum()
        if z_loss > 0:
            loss = loss + z_loss * lse_N.square().sum()
        return loss * weight

    @staticmethod
    def backward(ctx, upstream):
        with torch.no_grad():
            gradients = SummedLoss._gradients(ctx, upstream)
        return (*_once(ctx, gradients, upstream), *[None] * 9)

    @staticmethod
    def _gradients(ctx, upstream):
        e_ND, c_VD, bias_V, codes_N, weight, lse_N, nll_N, *gradients = ctx.saved_tensors
        softcap, z_loss, filter_eps, filter_e, filter_c, accumulation, workspace_mib = ctx.options
        needs = ctx.needs_input_grad[:2]
        if torch.compiler.is_compiling():
            gradients = [(gradient * upstream.float()).to(gradient.dtype) for gradient in gradients]
        elif ctx.spent:
            dloss_N = (upstream * weight).expand(codes_N.shape[0]).contiguous()
            gradients = backward_parts(
                e_ND, c_VD, bias_V, codes_N, lse_N, nll_N, tile_maxima_like(e_ND, c_VD, False), dloss_N,
                2 * z_loss * lse_N * dloss_N if z_loss > 0 else None, softcap, 0.0,
                filter_eps, filter_e, filter_c, accumulation, workspace_mib, [*needs, False], *ctx.dtypes,
            )  # fmt: skip
        else:
            from cce import kernels

            ctx.spent = True
            for gradient, need in zip(gradients, needs):
                if need:
                    kernels.scale_in_place(gradient, upstream)
        # Autograd may keep these very tensors as .grad, and whoever writes there must not count as writing to what was saved for
        # a second pass, which does not read it: .data counts apart.
        return [gradient.data if need else None for gradient, need in zip(gradients, needs)]
