"""One autograd function over two custom operators; the operators pick the Triton kernels or the blockwise path.

The operators are opaque to torch.compile and have fakes, so the loss compiles without a graph break
(except with vocabulary parallelism, whose collectives run in eager mode).
"""

import os

import torch

from cce import blockwise
from cce.plans import one_pass_chunk
from cce.presets import Accumulation, GradientMode
from cce.targets import IGNORED, check_range, encode_targets
from cce.tiles import filter_tile
from cce.vocab_parallel import VocabParallelOptions, combine_parts, reduce_e_grad


def runs_kernels(tensor: torch.Tensor) -> bool:
    """CUDA tensors take the Triton kernels; CPU tensors only under TRITON_INTERPRET=1. float64 has no kernels."""
    if tensor.dtype == torch.float64:
        return False
    return tensor.device.type == "cuda" or (tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def tile_maxima_like(e: torch.Tensor, c: torch.Tensor, needed: bool) -> torch.Tensor:
    """What the filter keeps of the forward pass: [tiles of classes, N] fp16 for the kernels, nothing for the blockwise path."""
    columns = filter_tile(interpret=e.device.type == "cpu")[1]
    tiles = -(-c.shape[0] // columns) if needed and runs_kernels(e) else 0
    return e.new_empty(tiles, e.shape[0], dtype=torch.float16)


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


def forward_parts(e, c, bias, codes, softcap, need_mean, need_maxima):
    with torch.autocast(e.device.type, enabled=False):
        if runs_kernels(e):
            from cce import kernels

            return kernels.forward_parts(e, c, bias, codes, softcap, need_mean, need_maxima)
        return *blockwise.forward_parts(e, c, bias, codes, softcap, need_mean), tile_maxima_like(e, c, False)


forward_op = torch.library.custom_op(
    "cce::forward_parts",
    forward_parts,
    mutates_args=(),
    schema=(
        "(Tensor e, Tensor c, Tensor? bias, Tensor codes, float? softcap, bool need_mean, bool need_maxima) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


@forward_op.register_fake
def _(e, c, bias, codes, softcap, need_mean, need_maxima):
    part = e.new_empty(e.shape[0], dtype=torch.promote_types(e.dtype, torch.float32))
    return part, torch.empty_like(part), torch.empty_like(part), tile_maxima_like(e, c, need_maxima)


def backward_parts(
    e, c, bias, codes, lse, nll, maxima, dloss, dlse, softcap, label_smoothing,
    filter_eps, filter_e, filter_c, accumulation, workspace_mib, needs, e_dtype, c_dtype,
):  # fmt: skip
    mode = GradientMode(filter_eps, filter_e, filter_c, accumulation)
    before = (e, c, bias, codes, lse, nll)
    after = (dloss, dlse, softcap, label_smoothing, mode, tuple(needs), (e_dtype, c_dtype))
    with torch.autocast(e.device.type, enabled=False):
        if runs_kernels(e):
            from cce import kernels

            gradients = kernels.backward_parts(*before, maxima, *after, workspace_mib)
        else:
            gradients = blockwise.backward_parts(*before, *after)
    return tuple(e.new_empty(0) if gradient is None else gradient for gradient in gradients)


backward_op = torch.library.custom_op(
    "cce::backward_parts",
    backward_parts,
    mutates_args=(),
    schema=(
        "(Tensor e, Tensor c, Tensor? bias, Tensor codes, Tensor lse, Tensor nll, Tensor maxima, Tensor dloss, Tensor? dlse, "
        "float? softcap, float label_smoothing, float? filter_eps, bool filter_e, bool filter_c, str accumulation, "
        "float? workspace_mib, bool[3] needs, ScalarType e_dtype, ScalarType c_dtype) -> (Tensor, Tensor, Tensor)"
    ),
)


@backward_op.register_fake
def _(
    e, c, bias, codes, lse, nll, maxima, dloss, dlse, softcap, label_smoothing,
    filter_eps, filter_e, filter_c, accumulation, workspace_mib, needs, e_dtype, c_dtype,
):  # fmt: skip
    shapes = (e.shape, c.shape, c.shape[:1])
    dtypes = (e_dtype, c_dtype, lse.dtype)
    return tuple(
        e.new_empty(shape, dtype=dtype) if need else e.new_empty(0) for need, shape, dtype in zip(needs, shapes, dtypes)
    )


def chunk_of_tokens(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    dtype: torch.dtype,
    mode: GradientMode,
    workspace_mib: float | None,
) -> tuple[int, Accumulation] | None:
    """(tokens of a chunk, how dC's sum is kept) for `one_pass`, or None where the gradients are to be made by slices in the backward pass.

    One pass has kernels for products in bf16 and for gradients of e and c that nothing is left out of.
    """
    wanted = torch.is_grad_enabled() and (e_ND.requires_grad or c_VD.requires_grad)
    of_bias = bias_V is not None and bias_V.requires_grad
    if not wanted or of_bias or dtype != torch.bfloat16 or mode.filter_eps is not None or not runs_kernels(e_ND):
        return None
    if e_ND.shape[0] == 0:
        return None
    # torch.compile looks once, and warns of caches.
    choose = one_pass_chunk.__wrapped__ if torch.compiler.is_compiling() else one_pass_chunk
    return choose(
        *e_ND.shape,
        c_VD.shape[0],
        mode.accumulation,
        workspace_mib,
        c_VD.requires_grad,
        interpret=e_ND.device.type == "cpu",
    )


def one_pass(e, c, bias, codes, dloss, softcap, z_loss, chunk, accumulation, need_e, need_c, e_dtype, c_dtype):
    from cce import kernels

    with torch.autocast(e.device.type, enabled=False):
        nll, lse, de, dc = kernels.one_pass(
            e, c, bias, codes, dloss, softcap, z_loss, chunk, accumulation, (need_e, need_c), (e_dtype, c_dtype)
        )
    # An operator's results share no memory.
    de = e.new_empty(0, dtype=e_dtype) if de is None else de
    dc = e.new_empty(0, dtype=c_dtype) if dc is None else dc
    return nll.clone(), lse.clone(), de, dc


one_pass_op = torch.library.custom_op(
    "cce::one_pass",
    one_pass,
    mutates_args=(),
    schema=(
        "(Tensor e, Tensor c, Tensor? bias, Tensor codes, Tensor dloss, float? softcap, float z_loss, int chunk, "
        "str accumulation, bool need_e, bool need_c, ScalarType e_dtype, ScalarType c_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


@one_pass_op.register_fake
def _(e, c, bias, codes, dloss, softcap, z_loss, chunk, accumulation, need_e, need_c, e_dtype, c_dtype):
    nll = e.new_empty(e.shape[0], dtype=torch.float32)
    de = e.new_empty(e.shape if need_e else 0, dtype=e_dtype)
    return nll, torch.empty_like(nll), de, e.new_empty(c.shape if need_c else 0, dtype=c_dtype)


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
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (*ctx.saved_tensors[:3], dloss_N, dlse_N)
            gradients = [None if gradient is None else _Once.apply(gradient, *inputs) for gradient in gradients]
        return (*gradients, *[None] * 8)

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
        chunk: tuple[int, Accumulation],
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
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (*ctx.saved_tensors[:3], upstream)
            gradients = [None if gradient is None else _Once.apply(gradient, *inputs) for gradient in gradients]
        return (*gradients, *[None] * 9)

    @staticmethod
    def _gradients(ctx, upstream):
        e_ND, c_VD, bias_V, codes_N, weight, lse_N, nll_N, *gradients = ctx.saved_tensors
        softcap, z_loss, filter_eps, filter_e, filter_c, accumulation, workspace_mib = ctx.options
        needs = ctx.needs_input_grad[:2]
        if torch.compiler.is_compiling():
            gradients = [gradient * upstream.to(gradient.dtype) for gradient in gradients]
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
        return [gradient if need else None for gradient, need in zip(gradients, needs)]
