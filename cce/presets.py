"""Presets: which gradient may be filtered, and how the one gradient that is a sum over calls is accumulated.

That gradient is dE where the vocabulary is walked by slices, and dC where tokens are walked by chunks (cce/plans.py); the
other one is finished by single products.

| impl                                                   | filters dE | filters dC | accumulation               |
| ------------------------------------------------------ | ---------- | ---------- | -------------------------- |
| cce_kahan_full_c (default)                             | no         | no         | Kahan, or fp32 if it fits  |
| cce_exact = cce_kahan_full = cce_kahan_full_c_full_e   | no         | no         | fp32                       |
| cce_kahan_full_e                                       | no         | yes        | Kahan, or fp32 if it fits  |
| cce_kahan                                              | yes        | yes        | Kahan, or fp32 if it fits  |
| cce                                                    | argument   | argument   | plain, or fp32 by argument |
| torch_compile                                          | no         | no         | one product, logits kept   |

Only `cce` reads filter_eps, accum_e_fp32 and filter_*_grad; every other preset fixes them, as in Apple's.
"""

import enum
import math
from dataclasses import dataclass
from typing import Literal

import torch

Accumulation = Literal["plain", "kahan", "fp32"]


class LinearCrossEntropyImpl(enum.IntEnum):
    """Names of the presets; `impl` takes a member or its lower-case name. The first seven are Apple's, in order."""

    CCE = enum.auto()
    TORCH_COMPILE = enum.auto()
    CCE_KAHAN_FULL_C = enum.auto()
    CCE_KAHAN_FULL_E = enum.auto()
    CCE_EXACT = enum.auto()
    CCE_KAHAN_FULL_C_FULL_E = enum.auto()
    CCE_KAHAN_FULL = enum.auto()
    CCE_KAHAN = enum.auto()


@dataclass(frozen=True)
class GradientMode:
    """How the backward computes its gradients.

    filter_eps: None, or the bound under which a tile of p - onehot is dropped (paper, section 4.3).
    filter_e, filter_c: whether dE and dC drop such tiles; both False when filter_eps is None.
    accumulation: of dE over slices of the vocabulary, or of dC over chunks of tokens: "plain" in the gradient's dtype (by slices
        only), "kahan" with a second tensor of that dtype for the rounding error (or as "fp32", no less exact and faster, where
        the workspace has room for that), "fp32" in an fp32 buffer. All three are fp32 when the gradient is fp32.
    """

    filter_eps: float | None
    filter_e: bool
    filter_c: bool
    accumulation: Accumulation


# impl -> (filters dE, filters dC, accumulation)
_FIXED: dict[str, tuple[bool, bool, Accumulation]] = {
    "cce_kahan": (True, True, "kahan"),
    "cce_kahan_full_c": (False, False, "kahan"),
    "cce_kahan_full_e": (False, True, "kahan"),
    "cce_exact": (False, False, "fp32"),
    "cce_kahan_full": (False, False, "fp32"),
    "cce_kahan_full_c_full_e": (False, False, "fp32"),
}
IMPLS = tuple(member.name.lower() for member in LinearCrossEntropyImpl)


def impl_name(impl: str | LinearCrossEntropyImpl) -> str:
    """The lower-case name of a preset; ValueError with the known names for anything else."""
    name = impl.name.lower() if isinstance(impl, LinearCrossEntropyImpl) else impl
    if name not in IMPLS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(IMPLS)}.")
    return name


def resolve_filter_eps(filter_eps: float | str | None, dtype: torch.dtype) -> float | None:
    """`auto` is finfo(dtype).eps / 32, the paper's 2^-12 for bf16; a number or None stays."""
    if filter_eps is None:
        return None
    if filter_eps == "auto":
        return torch.finfo(dtype).eps / 32
    if isinstance(filter_eps, bool) or not isinstance(filter_eps, (int, float)) or not 0 <= filter_eps < math.inf:
        raise ValueError(f"filter_eps={filter_eps!r} is not 'auto', None or a finite number >= 0.")
    return float(filter_eps)


def gradient_mode(
    impl: str,
    dtype: torch.dtype,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
) -> GradientMode:
    """The mode of preset `impl` (see the table above) for products in `dtype`."""
    eps = resolve_filter_eps(filter_eps, dtype)
    if impl == "cce":
        accumulation: Accumulation = "fp32" if accum_e_fp32 else "plain"
        filter_e, filter_c = filter_e_grad, filter_c_grad
    else:
        filter_e, filter_c, accumulation = _FIXED[impl]
        eps = resolve_filter_eps("auto", dtype)
    if eps is None or not (filter_e or filter_c):
        return GradientMode(None, False, False, accumulation)
    return GradientMode(eps, filter_e, filter_c, accumulation)
