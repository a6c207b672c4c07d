"""The problems of the benchmark: a shape (N tokens, D hidden, V vocabulary) and a kind of softmax.

Kinds, all with Zipf-distributed targets (P(class) ∝ 1 / rank) and bf16 inputs:

untrained   logits of standard deviation 0.02·√D around 0: every probability is near 1 / V (a fresh head)
trained     a Zipf unigram bias, a peak at the target (60 % of the tokens) and at a second class, a broad tail: a loss of
            several nats
confident   the target's logit CONFIDENT_MARGIN nats above the log-sum-exp of all others: median p_target > 0.999
"""

import argparse
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("untrained", "trained", "confident")
CONFIDENT_MARGIN = 10.0  # nats: p_target ≈ 1 − 4.5e-5
_NOISE = 0.7  # standard deviation of a hidden state's components that say nothing about the target


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    vocabulary: int

    @property
    def size(self) -> str:
        return f"{self.tokens}x{self.hidden}x{self.vocabulary}"

    @property
    def name(self) -> str:
        """Its letter in NAMED, else NxDxV."""
        return next((name for name, shape in NAMED.items() if shape == self), self.size)

    @property
    def product_flops(self) -> int:
        """2·N·D·V: the operations of the logits product, the unit GEMM."""
        return 2 * self.tokens * self.hidden * self.vocabulary


NAMED = {
    "A": Shape(16384, 2048, 128256),  # the 1.3 B model of the proposal
    "B": Shape(65536, 256, 32768),  # its minimum viable experiment
    "C": Shape(8192, 2304, 256000),  # Gemma 2 2B in the CCE paper
}
TINY = Shape(512, 128, 8192)  # what a CPU can do in a minute


def parse_shape(text: str) -> Shape:
    """A letter of NAMED, or NxDxV. ValueError, naming the value, for anything else."""
    if text in NAMED:
        return NAMED[text]
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(f"shape {text!r} is neither one of {', '.join(NAMED)} nor NxDxV, as in {TINY.size}")
    return Shape(*map(int, match.groups()))


def add_arguments(parser: argparse.ArgumentParser, shapes: list[str], kinds: list[str]) -> None:
    """--shapes, --kinds and --seed, with these defaults: which problems."""
    every = ", ".join(NAMED)
    parser.add_argument(
        "--shapes", nargs="+", default=shapes, metavar="SHAPE", help=f"{every} or NxDxV (default: {shapes})"
    )
    parser.add_argument(
        "--kinds", nargs="+", default=kinds, metavar="KIND", help=f"of {', '.join(KINDS)} (default: {kinds})"
    )
    parser.add_argument("--seed", type=int, default=0)


def asked(args: argparse.Namespace) -> list[tuple[Shape, str]]:
    """(shape, kind) of each problem that the arguments ask for; ValueError, naming the value, for what does not exist."""
    shapes = [parse_shape(text) for text in args.shapes]
    problems = [(shape, kind) for shape in shapes for kind in args.kinds]
    for shape, kind in problems:
        check_problem(shape, kind)
    return problems


def check_problem(shape: Shape, kind: str) -> None:
    """ValueError if there is no such kind, or none of this shape."""
    if kind not in KINDS:
        raise ValueError(f"softmax {kind!r} is unknown: take one of {', '.join(KINDS)}")
    if kind == "confident":
        _confident_scale(shape)


def problem(
    shape: Shape, kind: str, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """(e (N, D), c (V, D), targets (N) int64): e and c are leaves in `dtype` that require gradients."""
    check_problem(shape, kind)
    generator = torch.Generator(device).manual_seed(seed)
    zipf_V = 1.0 / torch.arange(1, shape.vocabulary + 1, device=device, dtype=torch.float32)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, shape.hidden, device=device, generator=generator, dtype=torch.float32)

    def classes() -> Tensor:
        return torch.multinomial(zipf_V, shape.tokens, replacement=True, generator=generator)

    c_VD = normal(shape.vocabulary)
    targets_N = classes()
    e_ND = normal(shape.tokens)
    if kind == "untrained":
        c_VD *= 0.02
    else:
        c_VD /= math.sqrt(shape.hidden)  # rows of norm 1
        e_ND *= _NOISE
        if kind == "trained":
            second_N = classes()
            sees_target_N1 = torch.rand(shape.tokens, 1, device=device, generator=generator) < 0.6
            e_ND += 7.0 * (sees_target_N1 * c_VD[targets_N] + 0.9 * c_VD[second_N])
            # One component carries the bias of the unigram frequencies.
            c_VD[:, 0] = zipf_V.log() / 4
            e_ND[:, 0] = 4
        else:
            e_ND += _confident_scale(shape) * c_VD[targets_N]
    return e_ND.to(dtype).requires_grad_(), c_VD.to(dtype).requires_grad_(), targets_N


def _confident_scale(shape: Shape) -> float:
    """The factor s of e = s·c[target] + noise for which the target's logit s is CONFIDENT_MARGIN above the others' lse.

    The others' logits are normal with variance (s² + D·noise²) / D, so their lse is about log V + half of that variance:
    s − s² / (2 D) = m with m = log V + CONFIDENT_MARGIN + noise² / 2.
    """
    m, D = math.log(shape.vocabulary) + CONFIDENT_MARGIN + _NOISE**2 / 2, shape.hidden
    if D < 2 * m:
        raise ValueError(
            f"shape {shape.size} has no confident softmax: {shape.vocabulary} classes in D = {D} lie too close to each "
            f"other; take D ≥ {math.ceil(2 * m)}, or another kind"
        )
    return D * (1 - math.sqrt(1 - 2 * m / D))
