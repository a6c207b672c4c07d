"""One autograd function over two custom operators; the operators pick the Triton kernels or the blockwise path.

The operators are opaque to torch.compile and have fakes, so the loss compiles without a graph break
(except with vocabulary parallelism, whose collectives run in eager mode).
"""

import os

import torch

from cce import blockwise
from cce.presets import GradientMode
from cce.targets import IGNORED, check_range, encode_targets
from cce.vocab_parallel import VocabParallelOptions, combine_parts, reduce_e_grad


def runs_kernels(tensor: torch.Tensor) -> bool:
    """CUDA tensors take the Triton kernels; CPU tensors only under TRITON_INTERPRET=1. float64 has no kernels."""
    if tensor.dtype == torch.float64:
        return False
    return tensor.device.type == "cuda" or (tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def _path(tensor: torch.Tensor):
    if not runs_kernels(tensor):
        return blockwise
    from cce import kernels

    return kernels


# ---- custom operators ----
#
# Each is a plain function and an operator over it. Eager mode calls the function: a layer of Python less on the host, where
# small models spend their steps.


def called(function, operator):
    """The operator while torch.compile traces, else the function."""
    return operator if torch.compiler.is_compiling() else function


def encode(targets, ignore_index, start, stop, sharded):
    if targets.device.type == "cpu" and not sharded:
        check_range(targets, stop, ignore_index)
    return encode_targets(targets.reshape(-1), ignore_index, start, stop, sharded)


encode_op = torch.library.custom_op(
    "cce::encode_targets",
    encode,
    mutates_args=(),
    schema="(Tensor targets, int ignore_index, int start, int stop, bool sharded) -> Tensor",
)


@encode_op.register_fake
def _(targets, ignore_index, start, stop, sharded):
    return targets.new_empty(targets.numel(), dtype=torch.int32)


def forward_parts(e, c, bias, codes, softcap, need_mean):
    with torch.autocast(e.device.type, enabled=False):
        return _path(e).forward_parts(e, c, bias, codes, softcap, need_mean)


forward_op = torch.library.custom_op(
    "cce::forward_parts",
    forward_parts,
    mutates_args=(),
    schema=(
        "(Tensor e, Tensor c, Tensor? bias, Tensor codes, float? softcap, bool need_mean) -> (Tensor, Tensor, Tensor)"
    ),
)


@forward_op.register_fake
def _(e, c, bias, codes, softcap, need_mean):
    part = e.new_empty(e.shape[0], dtype=torch.promote_types(e.dtype, torch.float32))
    return part, torch.empty_like(part), torch.empty_like(part)


def backward_parts(
    e, c, bias, codes, lse, nll, dloss, dlse, softcap, label_smoothing,
    filter_eps, filter_e, filter_c, accumulation, workspace_mib, needs, e_dtype, c_dtype,
):  # fmt: skip
    mode = GradientMode(filter_eps, filter_e, filter_c, accumulation)
    dtypes = (e_dtype, c_dtype)
    arguments = (e, c, bias, codes, lse, nll, dloss, dlse, softcap, label_smoothing, mode, tuple(needs), dtypes)
    with torch.autocast(e.device.type, enabled=False):
        if runs_kernels(e):
            from cce import kernels

            gradients = kernels.backward_parts(*arguments, workspace_mib)
        else:
            gradients = blockwise.backward_parts(*arguments)
    return tuple(e.new_empty(0) if gradient is None else gradient for gradient in gradients)


backward_op = torch.library.custom_op(
    "cce::backward_parts",
    backward_parts,
    mutates_args=(),
    schema=(
        "(Tensor e, Tensor c, Tensor? bias, Tensor codes, Tensor lse, Tensor nll, Tensor dloss, Tensor? dlse, "
        "float? softcap, float label_smoothing, float? filter_eps, bool filter_e, bool filter_c, str accumulation, "
        "float? workspace_mib, bool[3] needs, ScalarType e_dtype, ScalarType c_dtype) -> (Tensor, Tensor, Tensor)"
    ),
)


@backward_op.register_fake
def _(
    e, c, bias, codes, lse, nll, dloss, dlse, softcap, label_smoothing,
    filter_eps, filter_e, filter_c, accumulation, workspace_mib, needs, e_dtype, c_dtype,
):  # fmt: skip
    shapes = (e.shape, c.shape, c.shape[:1])
    dtypes = (e_dtype, c_dtype, lse.dtype)
    return tuple(
        e.new_empty(shape, dtype=dtype) if need else e.new_empty(0) for need, shape, dtype in zip(needs, shapes, dtypes)
    )


# ---- autograd ----


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
        rest_N, target_N, mean_N = called(forward_parts, forward_op)(e_ND, c_VD, bias_V, codes_N, softcap, label_smoothing > 0)
        if shard is not None:
            rest_N, target_N = combine_parts(rest_N, target_N, codes_N, shard.group)
        # -log p(target) = log(1 + exp(rest - target)) keeps its relative precision when p is close to 1.
        ignored_N = codes_N == IGNORED
        nll_N = torch.logaddexp(rest_N - target_N, torch.zeros_like(rest_N)).masked_fill(ignored_N, 0)
        lse_N = torch.logaddexp(rest_N, target_N).masked_fill(ignored_N, 0)
        ctx.save_for_backward(e_ND, c_VD, bias_V, codes_N, lse_N, nll_N)
        loss_N = nll_N.clone()
        if label_smoothing > 0:
            loss_N += label_smoothing * (target_N - mean_N).masked_fill(ignored_N, 0)
        return (loss_N, lse_N.clone()) if with_lse else loss_N

    @staticmethod
    def backward(ctx, dloss_N, dlse_N=None):
        with torch.no_grad():
            gradients = TokenLosses._gradients(ctx, dloss_N, dlse_N)
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (*ctx.saved_tensors[:3], dloss_N, dlse_N)
            gradients = [None if gradient is None else _Once.apply(gradient, *inputs) for gradient in gradients]
        return (*gradients, *[None] * 8)

    @staticmethod
    def _gradients(ctx, dloss_N, dlse_N):
        e_ND, c_VD, bias_V, codes_N, lse_N, nll_N = ctx.saved_tensors
        softcap, label_smoothing, filter_eps, filter_e, filter_c, accumulation, workspace_mib = ctx.options
        needs = ctx.needs_input_grad[:3]
        de_ND, dc_VD, dbias_V = called(backward_parts, backward_op)(
            e_ND, c_VD, bias_V, codes_N, lse_N, nll_N, dloss_N.contiguous(),
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
