"""Loss and gradients in one pass over chunks of tokens: exponentials are kept instead of computed again, 3 products in all.

For each chunk of n tokens:
  1. one kernel computes the logits and keeps w = exp(z - reference) [n, V] in bf16, 0 for each token's target, with the
     sums of the unrounded w; a small one makes of them loss, lse, and per token the scale of w and the target's entry;
  2. dE = scale (w C) + own c_target: one product over the whole vocabulary, finished and rounded once;
  3. dC += w^T (scale e): the only sum over chunks: Kahan or fp32 (cce/presets.py).
At the end the targets' entries, own e, are added to their rows of dC. They never pass through bf16: what a target's entry
loses to rounding is nothing, however close to 1 its probability is.
"""

from collections.abc import Callable

import torch
import triton

from cce.kernels.exponentials import exponentials
from cce.kernels.finishing import add_target_rows, hidden_gradient
from cce.kernels.launch import in_chunks
from cce.kernels.problem import Problem
from cce.kernels.product import kahan_block, kahan_product, product_into
from cce.kernels.target_logit import target_logit
from cce.plans import one_pass_splits
from cce.presets import Accumulation
from cce.tiles import architecture, logits_tile, padded_width


def chunked(
    problem: Problem,
    chunk: int,
    tokens: torch.Tensor,
    de_ND: torch.Tensor | None,
    dc_VD: torch.Tensor | None,
    accumulation: Accumulation,
) -> None:
    """Fill tokens, whose first two rows of [4, N] fp32 are nll and lse, de and dc, `accumulation`'s sum."""
    rounded = dc_VD is not None and dc_VD.dtype != torch.float32
    fp32_sum = rounded and accumulation == "fp32"
    sum_VD = torch.empty_like(dc_VD, dtype=torch.float32) if fp32_sum else dc_VD
    comp_VD = torch.empty_like(dc_VD) if rounded and accumulation == "kahan" else None
    # While dC's sum is kept elsewhere, its own memory has room for exponentials.
    room = dc_VD.view(-1).view(problem.e_ND.dtype) if fp32_sum else None
    _chunks(problem, chunk, tokens, de_ND, sum_VD, comp_VD, room)
    if dc_VD is not None:
        add_target_rows(problem.e_ND, tokens[3], problem.codes_N, sum_VD, comp_VD)
        if fp32_sum:
            dc_VD.copy_(sum_VD)


def _chunks(
    problem: Problem,
    chunk: int,
    tokens: torch.Tensor,
    de_ND: torch.Tensor | None,
    sum_VD: torch.Tensor | None,
    comp_VD: torch.Tensor | None,
    room: torch.Tensor | None,
) -> None:
    """Fill tokens = (nll, lse, scale, own) [4, N] fp32, de, and sum, with its compensation, but for the targets' entries.

    room: memory that may hold the exponentials of a chunk, bf16. What else it takes is free again afterwards.
    """
    e_ND, c_VD, bias_V, codes_N, _, softcap, _ = problem
    (N, D), V = e_ND.shape, c_VD.shape[0]
    arch = architecture(e_ND.device, e_ND.dtype)
    tile = logits_tile(e_ND.dtype, D, arch, stored=True)
    f32 = dict(dtype=torch.float32, device=e_ND.device)
    parts = torch.empty(one_pass_splits(chunk, V, D, arch), chunk, **f32)
    tile_references = torch.empty(triton.cdiv(V, tile.columns), chunk, **f32)
    de_chunk = None if de_ND is None else torch.empty(chunk, D, **f32)
    scaled_e = None if sum_VD is None else torch.empty(chunk, D, dtype=e_ND.dtype, device=e_ND.device)
    block = None if comp_VD is None else torch.empty(min(V, kahan_block(D)), D, **f32)
    width = padded_width(V, e_ND.element_size())
    if room is None or room.numel() < chunk * width:
        room = torch.empty(chunk * width, dtype=e_ND.dtype, device=e_ND.device)
    w = room[: chunk * width].view(chunk, width)[:, :V]
    target_N = target_logit(e_ND, c_VD, bias_V, codes_N, softcap)
    _, _, scale_N, own_N = tokens

    def steps(n: int) -> Callable[[int], None]:
        """step(first): the work on tokens first to first + n."""
        w_nV = w[:n]
        s_nD, x_nD = (None if matrix is None else matrix[:n] for matrix in (scaled_e, de_chunk))
        of_classes, of_tokens = exponentials(problem, target_N, w_nV, s_nD, parts, tile_references, tuple(tokens))
        finish = None if de_ND is None else hidden_gradient(x_nD, scale_N, own_N, c_VD, codes_N, de_ND)

        def step(first: int) -> None:
            of_classes(first)
            of_tokens(first)
            if de_ND is not None:
                product_into(w_nV, c_VD, x_nD, add=False)
                finish(first)
            if block is not None:
                kahan_product(w_nV, s_nD, sum_VD, comp_VD, block, transposed=True, add=first > 0)
            elif sum_VD is not None:
                product_into(w_nV, s_nD, sum_VD, transposed=True, add=first > 0)

        return step

    in_chunks(N, chunk, steps)
