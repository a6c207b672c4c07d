"""Custom operators: opaque to torch.compile, with fakes, so that the loss compiles without a graph break
(except with vocabulary parallelism, whose collectives run in eager mode). They pick the Triton kernels or the blockwise path.

Each is a plain function and an operator over it. Eager mode calls the function: a layer of Python less on the host, where small
models spend their steps.
"""

import torch

from cce import blockwise
from cce.presets import GradientMode
from cce.targets import check_range, encode_targets
from cce.tiles import architecture, filter_tile, interpreting


def runs_kernels(tensor: torch.Tensor) -> bool:
    """CUDA tensors take the Triton kernels; CPU tensors only under TRITON_INTERPRET=1. float64 has no kernels."""
    if tensor.dtype == torch.float64:
        return False
    return tensor.device.type == "cuda" or (tensor.device.type == "cpu" and interpreting())


def tile_maxima_like(e: torch.Tensor, c: torch.Tensor, needed: bool) -> torch.Tensor:
    """What the filter keeps of the forward pass: [tiles of classes, N] fp16 for the kernels, nothing for the blockwise path."""
    if not needed or not runs_kernels(e):
        return e.new_empty(0, e.shape[0], dtype=torch.float16)
    columns = filter_tile(architecture(e.device, e.dtype))[1]
    return e.new_empty(-(-c.shape[0] // columns), e.shape[0], dtype=torch.float16)


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
    with torch.autocast(e.device.type, enabled=False), torch.cuda.device_of(e):
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
    with torch.autocast(e.device.type, enabled=False), torch.cuda.device_of(e):
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


def one_pass(e, c, bias, codes, dloss, softcap, z_loss, chunk, kept, need_e, need_c, e_dtype, c_dtype):
    from cce import kernels

    with torch.autocast(e.device.type, enabled=False), torch.cuda.device_of(e):
        nll, lse, de, dc = kernels.one_pass(
            e, c, bias, codes, dloss, softcap, z_loss, chunk, kept, (need_e, need_c), (e_dtype, c_dtype)
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
        "str kept, bool need_e, bool need_c, ScalarType e_dtype, ScalarType c_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


@one_pass_op.register_fake
def _(e, c, bias, codes, dloss, softcap, z_loss, chunk, kept, need_e, need_c, e_dtype, c_dtype):
    nll = e.new_empty(e.shape[0], dtype=torch.float32)
    de = e.new_empty(e.shape if need_e else 0, dtype=e_dtype)
    return nll, torch.empty_like(nll), de, e.new_empty(c.shape if need_c else 0, dtype=c_dtype)
