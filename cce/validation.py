"""Errors before any work: each check names the value and what would be right."""

import math

import torch

from cce.presets import impl_name, resolve_filter_eps
from cce.vocab_parallel import VocabParallelOptions

REDUCTIONS = ("mean", "sum", "none")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _shape(tensor: torch.Tensor) -> str:
    return "(" + ", ".join(map(str, tensor.shape)) + ")"


def _reject_dtensors(**tensors: torch.Tensor | None) -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a DTensor; pass the local tensor ({name}.full_tensor(), or {name}.to_local() together with "
                "vocab_parallel_options for a classifier that is sharded over the vocabulary)."
            )


def compute_dtype(e: torch.Tensor) -> torch.dtype:
    """The dtype of the products: autocast's where autocast is on for e's device, else e's. fp64 is never lowered."""
    kind = e.device.type
    if e.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return e.dtype


def check_tensors(e: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Shapes, dtypes and devices of the tensor arguments; ValueError or TypeError."""
    _reject_dtensors(e=e, c=c, targets=targets, bias=bias)
    for name, tensor in (("e", e), ("c", c)):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be bfloat16, float16, float32 or float64.")
    if targets.dtype not in INTEGERS:
        raise TypeError(f"targets have dtype {targets.dtype}; they are class indices and must be integers (int64).")
    if e.ndim < 2 or c.ndim != 2:
        raise ValueError(f"e must be (..., D) with at least 2 axes and c (V, D); got e {_shape(e)} and c {_shape(c)}.")
    if e.shape[-1] != c.shape[1] or c.shape[0] == 0 or c.shape[1] == 0:
        raise ValueError(f"e {_shape(e)} and c {_shape(c)} must share their last axis D > 0, and c needs V > 0 rows.")
    if e.shape[:-1] != targets.shape:
        raise ValueError(f"targets {_shape(targets)} must have e's shape without its last axis; e is {_shape(e)}.")
    if bias is not None:
        if bias.shape != c.shape[:1]:
            raise ValueError(f"bias {_shape(bias)} must have one number for each of c's {c.shape[0]} rows.")
        if bias.dtype not in FLOATS:
            raise TypeError(f"bias has dtype {bias.dtype}; it must be bfloat16, float16, float32 or float64.")
    for name, tensor in (("c", c), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != e.device:
            raise ValueError(f"{name} is on {tensor.device} but e is on {e.device}; move them to one device.")
    if e.dtype != c.dtype and (torch.float64 in (e.dtype, c.dtype) or not torch.is_autocast_enabled(e.device.type)):
        raise TypeError(f"e is {e.dtype} and c is {c.dtype}; cast one of them, or call under torch.autocast.")


def check_options(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int,
    softcap: float | None,
    reduction: str,
    shift: int,
    filter_eps: float | str | None,
    impl: str,
    vocab_parallel_options: VocabParallelOptions | None,
    z_loss: float,
    label_smoothing: float,
    workspace_mib: float | None,
) -> None:
    """Every other argument; ValueError or TypeError."""
    impl_name(impl)
    resolve_filter_eps(filter_eps, e.dtype)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index={ignore_index!r} must be an integer.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; choose 'mean', 'sum' or 'none'.")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap!r} must be None or a finite number > 0.")
    length = targets.shape[-1]
    if shift != 0 and not 0 <= shift < length:
        raise ValueError(f"shift={shift} must be in [0, {length}), the length of the targets' last axis.")
    if not (math.isfinite(z_loss) and z_loss >= 0):
        raise ValueError(f"z_loss={z_loss!r} must be a finite number >= 0.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be in [0, 1].")
    if workspace_mib is not None and not (math.isfinite(workspace_mib) and workspace_mib > 0):
        raise ValueError(f"workspace_mib={workspace_mib!r} must be None or a finite number of MiB > 0.")
    if vocab_parallel_options is not None:
        rows = vocab_parallel_options.stop - vocab_parallel_options.start
        if c.shape[0] != rows:
            raise ValueError(
                f"c has {c.shape[0]} rows, but vocab_parallel_options covers [{vocab_parallel_options.start}, "
                f"{vocab_parallel_options.stop}), which is {rows}."
            )
        if label_smoothing != 0:
            raise ValueError("label_smoothing is not supported with vocab_parallel_options; set it to 0.")
