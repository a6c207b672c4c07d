"""Loss and gradients in one pass without keeping a logit: both gradients add up in registers (small D, Hopper).

  1. for each chunk of tokens one kernel makes w = exp(z - reference) of the logits, and w C, tile by tile, with the sums of w
     (cce/kernels/hopper/hidden_product.py); a small one makes of them loss, lse and dE = scale (w C) + own c_target;
  2. one kernel makes the logits again, classes first, and with lse g = p - onehot of them, and dC = dloss g^T e
     (cce/kernels/hopper/vocabulary_gradient.py).
Four products in all, as by slices, but no logit is written. What chunks are for is w C in fp32, in parts of the vocabulary where
tokens are few, which finds room in dC's own memory until 2.

w and g are rounded to bf16 as operands, sums are fp32, each gradient is rounded once. The target's entry of g is p - 1 =
-x / (1 + x), x = exp(rest - target): nothing is subtracted after rounding. In dE it stays in fp32.
"""

from collections.abc import Callable

import torch

from cce.kernels.kept import streamed_tokens
from cce.kernels.launch import in_chunks
from cce.kernels.problem import Problem
from cce.kernels.target_logit import target_logit
from cce.tiles import streaming_splits


def streamed(
    problem: Problem, chunk: int, tokens: torch.Tensor, de_ND: torch.Tensor | None, dc_VD: torch.Tensor | None
) -> None:
    """Fill tokens, whose first two rows of [4, N] fp32 are nll and lse, de and dc."""
    from cce.kernels import hopper

    (N, D), V = problem.e_ND.shape, problem.c_VD.shape[0]
    f32 = dict(dtype=torch.float32, device=problem.e_ND.device)
    splits, _ = streaming_splits(chunk, V)
    parts, references = torch.empty(2, splits, chunk, **f32)
    room = None if dc_VD is None else dc_VD.view(-1).view(torch.float32)
    if room is None or room.numel() < splits * chunk * D:
        room = torch.empty(splits * chunk * D, **f32)
    target_N = target_logit(problem.e_ND, problem.c_VD, problem.bias_V, problem.codes_N, problem.softcap)

    def steps(n: int) -> Callable[[int], None]:
        """step(first): the work on tokens first to first + n."""
        x_snD = room[: splits * n * D].view(splits, n, D)
        product = hopper.hidden_product(problem, target_N, x_snD, parts, references)
        of_tokens = streamed_tokens(problem, target_N, x_snD, parts, references, tuple(tokens), de_ND)

        def step(first: int) -> None:
            product(first)
            of_tokens(first)

        return step

    in_chunks(N, chunk, steps)
    if dc_VD is not None:
        _, lse_N, shift_N, own_N = tokens
        hopper.vocabulary_gradient(problem, lse_N, shift_N, own_N, dc_VD)
