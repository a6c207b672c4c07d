"""Every linear cross-entropy of the benchmark behind one signature: loss(e (N, D), c (V, D), targets (N)) → scalar.

An Entry is a name and a way to build that function; building imports what it needs and raises CannotRun, with the reason,
where the library is missing or does not run on this device. `entries` lists them for a problem: the standard loss, ours at
each budget of memory, then the peers.

`exact` is what an implementation claims: that no part of the gradient is dropped. How far rounding takes it from fp64 is
measured, not claimed.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from problems import Shape
from torch import Tensor

import cce
from models.loss_heads import CompiledHead, check_loss_head, materialized
from training.provenance import installed

IGNORE_INDEX = -100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class CannotRun(RuntimeError):
    """This entry cannot run on this machine; the message is the reason."""


class Built(NamedTuple):
    loss: Loss
    version: str  # of the implementation, as it names itself


@dataclass(frozen=True)
class Entry:
    """An implementation with its options.

    curve: the name that entries share which differ in workspace_mib alone; None for an implementation without a budget.
    workspace_mib: bound of the memory beyond inputs and gradients in MiB; None is the implementation's default.
    """

    name: str
    exact: bool
    build: Callable[[], Built]
    needs_cuda: bool = True
    curve: str | None = None
    workspace_mib: float | None = None

    def built(self, device: torch.device) -> Built:
        """The function, ready for tensors on `device`; CannotRun with the reason otherwise."""
        if self.needs_cuda and device.type != "cuda":
            raise CannotRun("needs a CUDA GPU")
        return self.build()


def entries(
    shape: Shape, kind: str, device: torch.device, budgets: Sequence[float | None] | None = None
) -> list[Entry]:
    """Every entry for a problem. `budgets` in MiB (None: the default) replace those of `default_budgets`."""
    return [*standard(device), *ours(shape, kind, device, budgets), *torchs(), *liger(), *fla(), *apple(), *quack()]


def selected(candidates: Sequence[Entry], wanted: Sequence[str]) -> list[Entry]:
    """The entries whose name contains one of `wanted`, upper and lower case alike; all of them for an empty `wanted`."""
    return [e for e in candidates if not wanted or any(part.lower() in e.name.lower() for part in wanted)]


def imported(module: str, package: str):
    """The module; CannotRun if its package is not installed or does not import here."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = f"{package} is not installed" if installed(package) is None else f"{package} does not import: {error}"
        raise CannotRun(reason) from error


# ---- the standard loss ----


def standard(device: torch.device) -> list[Entry]:
    torch_version = f"torch {torch.__version__}"

    def eager() -> Built:
        return Built(lambda e, c, targets: materialized(e, targets, c, None, IGNORE_INDEX), torch_version)

    def compiled() -> Built:
        try:
            check_loss_head("compile", device.type)
        except ValueError as error:
            raise CannotRun(str(error)) from error
        head = CompiledHead()
        return Built(lambda e, c, targets: head.mean_loss(e, targets, c, None), torch_version)

    return [
        Entry("standard eager", True, eager, needs_cuda=False),
        Entry("standard torch.compile", True, compiled, needs_cuda=False),
    ]


# ---- ours ----

# Preset → what it passes, and whether it claims the exact gradient.
PRESETS = {
    "cce_exact": ({"impl": "cce_exact"}, True),
    "cce_kahan_full_c": ({"impl": "cce_kahan_full_c"}, True),
    "plain accumulation": ({"impl": "cce", "filter_e_grad": False, "filter_c_grad": False}, True),
    "cce (filtered)": ({"impl": "cce"}, False),
}
# MiB beyond inputs and gradients, beside the default. cce_exact draws the curve; its fp32 copy of dE alone takes 128 (A), 72 (C)
# MiB. cce_kahan_full_c keeps rounding errors only below that, and in one pass below the fp32 copy of dC, 1002 (A), 2250 (C) MiB
# (cce/plans.py), so that is where it is measured; at B sums are in registers, or in fp32 where keeping exponentials is faster.
BUDGETS = {
    "A": {
        "cce_exact": (128, 512, 1100, 1536, 1600, 2100, 2700, 4096),
        "cce_kahan_full_c": (96, 112, 768, 1000),
        "cce (filtered)": (96, 192),
    },
    "B": {"cce_exact": (8, 128, 1200, 2400, 4096), "cce (filtered)": (512,)},
    "C": {"cce_exact": (136, 512, 2300, 3000, 3900), "cce_kahan_full_c": (64, 136, 2000), "cce (filtered)": (136,)},
}
OTHER_BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
# On the other softmax kinds, where only the error is of interest: one small and one large workspace.
ENDS = {
    "A": {"cce_exact": (1536,), "cce_kahan_full_c": (96,)},
    "B": {"cce_exact": (4096,)},
    "C": {"cce_exact": (3900,), "cce_kahan_full_c": (64,)},
}


def default_budgets(shape: Shape, kind: str, device: torch.device, preset: str) -> tuple[float | None, ...]:
    """The budgets measured at a shape: the whole curve on a trained softmax, the ends of it on the others.

    The time of an exact gradient does not depend on the softmax; its error does. On a CPU the budget is not read.
    """
    if device.type != "cuda":
        return (None,)
    logits_mib = shape.tokens * shape.vocabulary * 2 / 2**20
    other = tuple(budget for budget in OTHER_BUDGETS if budget < 2 * logits_mib) if preset == "cce_exact" else ()
    table = BUDGETS if kind == "trained" else ENDS
    return (None, *(table[shape.name].get(preset, ()) if shape.name in table else other))


def ours(shape: Shape, kind: str, device: torch.device, budgets: Sequence[float | None] | None) -> list[Entry]:
    def build(options: dict, workspace_mib: float | None) -> Built:
        loss = partial(cce.linear_cross_entropy, workspace_mib=workspace_mib, **options)
        return Built(loss, "cce of this repository")

    found = []
    for preset, (options, exact) in PRESETS.items():
        for budget in default_budgets(shape, kind, device, preset) if budgets is None else budgets:
            name = f"ours {preset}" + ("" if budget is None else f" {budget:g} MiB")
            found.append(Entry(name, exact, partial(build, options, budget), False, f"ours {preset}", budget))
    return found


# ---- the peers ----


def torchs() -> list[Entry]:
    """torch.nn.functional.linear_cross_entropy, from torch 2.13 on: over logits in memory, and chunked by its policies."""

    def build(policy: str | None) -> Built:
        if not hasattr(F, "linear_cross_entropy"):
            raise CannotRun(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
        options = None if policy is None else torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
        return Built(partial(F.linear_cross_entropy, options=options), f"torch {torch.__version__}")

    name = "torch F.linear_cross_entropy"
    chunked = [
        Entry(f"{name} chunked {policy}", True, partial(build, policy), needs_cuda=False)
        for policy in ("auto", "compact", "balanced", "accurate")
    ]
    return [Entry(name, True, partial(build, None), needs_cuda=False), *chunked]


def liger() -> list[Entry]:
    """Liger's fused linear cross-entropy; dC adds up in its own dtype, or in fp32."""

    def build(accum_dtype: torch.dtype | None) -> Built:
        module = imported("liger_kernel.transformers", "liger-kernel")
        head = module.LigerFusedLinearCrossEntropyLoss(accum_dtype=accum_dtype)
        return Built(lambda e, c, targets: head(c, e, targets), f"liger-kernel {installed('liger-kernel')}")

    return [
        Entry("Liger", True, partial(build, None)),
        Entry("Liger fp32 accumulation", True, partial(build, torch.float32)),
    ]


def fla() -> list[Entry]:
    def build() -> Built:
        head = imported("fla.modules", "flash-linear-attention").FusedLinearCrossEntropyLoss()
        return Built(lambda e, c, targets: head(e, targets, c), f"fla-core {installed('fla-core')}")

    return [Entry("FLA FusedLinearCrossEntropyLoss", True, build)]


def apple() -> list[Entry]:
    """apple/ml-cross-entropy: the package, or the checkout of `use_apple`. Only its cce_exact filters nothing."""

    def build(preset: str) -> Built:
        module = imported("cut_cross_entropy", "cut-cross-entropy")
        version = f"cut_cross_entropy {getattr(module, '__version__', installed('cut-cross-entropy'))}"
        known = [member.name.lower() for member in getattr(module, "LinearCrossEntropyImpl", ())]
        if preset not in known:
            raise CannotRun(f"{version} has no preset {preset}; it has {', '.join(known)}")
        return Built(partial(module.linear_cross_entropy, impl=preset), version)

    presets = ("cce", "cce_kahan", "cce_kahan_full_c", "cce_exact")
    return [Entry(f"Apple {preset}", preset == "cce_exact", partial(build, preset)) for preset in presets]


def use_apple(checkout: Path) -> None:
    """Take cut_cross_entropy from a checkout of apple/ml-cross-entropy. ValueError if it holds none."""
    if not (checkout / "cut_cross_entropy" / "__init__.py").is_file():
        raise ValueError(
            f"{checkout} holds no cut_cross_entropy/: give the root of a checkout of apple/ml-cross-entropy"
        )
    sys.path.insert(0, str(checkout.resolve()))


def quack() -> list[Entry]:
    """Dao-AILab/quack: chunks of tokens with logits kept; `scaled-exp` keeps exponentials scaled by tile instead."""

    def build(chunk: int, scaled_exp: bool) -> Built:
        module = imported("quack.linear_cross_entropy", "quack-kernels")
        loss = partial(module.chunked_linear_cross_entropy, chunk_size=chunk, use_scaled_exp=scaled_exp)
        return Built(loss, f"quack-kernels {installed('quack-kernels')}")

    return [
        Entry(f"quack {name} {chunk}", True, partial(build, chunk, scaled_exp))
        for name, scaled_exp in (("chunked", False), ("scaled-exp", True))
        for chunk in (1024, 2048, 4096)
    ]
