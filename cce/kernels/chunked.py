"""Loss and gradients in one pass over chunks of tokens: exponentials are kept instead of computed again, 3 products in all.

For each chunk of n tokens:
  1. one kernel computes the logits and keeps w = exp(z - reference) [n, V] in bf16, 0 for each token's target, with the
     sums of the unrounded w; a small one makes of them loss, lse, and per token the scale of w and the target's entry, own;
  2. dE = scale (w C) + own c_target: one product over the whole vocabulary, finished and rounded once. What a target's entry
     loses to rounding is nothing, however close to 1 its probability is;
  3. own / scale takes its place in w; dC += w^T (scale e): the only sum over chunks: Kahan or fp32 (cce/presets.py). Where
     one chunk is all tokens there is none: dC is rounded once, from one product.

w lies in dC's own memory as far as there is room: beside dC's sum in fp32 elsewhere, or, without a sum, beside the rows of dC
that are made of the first classes and moved to their place once these are used up.
"""

from collections.abc import Callable

import torch
import triton

from cce.kernels.exponentials import Kept, exponentials
from cce.kernels.finishing import hidden_gradient, target_entries
from cce.kernels.launch import in_chunks
from cce.kernels.problem import Problem
from cce.kernels.product import kahan_block, kahan_product, product_into
from cce.kernels.target_logit import target_logit
from cce.plans import chunk_sizes, classes_in_dc, one_pass_splits
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
    """Fill tokens, whose first two rows of [4, N] fp32 are nll and lse, de and dc: `accumulation`'s sum of chunks of `chunk` tokens, at
    most N."""
    N = problem.e_ND.shape[0]
    adds_up = chunk < N and dc_VD is not None and dc_VD.dtype != torch.float32
    fp32_sum = adds_up and accumulation == "fp32"
    sum_VD = torch.empty_like(dc_VD, dtype=torch.float32) if fp32_sum else dc_VD
    comp_VD = torch.empty_like(dc_VD) if adds_up and accumulation == "kahan" else None
    # While dC's sum is kept elsewhere, or needs not be kept, its own memory has room for exponentials.
    has_room = dc_VD is not None and (fp32_sum or chunk == N)
    room = dc_VD.view(-1).view(problem.e_ND.dtype) if has_room else None
    _chunks(problem, chunk, tokens, de_ND, sum_VD, comp_VD, room)
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
    """Fill tokens = (nll, lse, scale, own) [4, N] fp32, de, and sum, with its compensation.

    room: dC's own memory, bf16, where it may hold exponentials. What else it takes is free again afterwards.
    """
    e_ND, c_VD, bias_V, codes_N, _, softcap, _ = problem
    (N, D), V = e_ND.shape, c_VD.shape[0]
    arch = architecture(e_ND.device, e_ND.dtype)
    tile = logits_tile(e_ND.dtype, D, arch, stored=True)
    f32 = dict(dtype=torch.float32, device=e_ND.device)
    splits = {n: one_pass_splits(n, V, D, arch) for n in chunk_sizes(N, chunk)}
    parts = torch.empty(max(splits[n] * n for n in splits), **f32)
    tile_references = torch.empty(triton.cdiv(V, tile.columns), chunk, **f32)
    de_chunk = None if de_ND is None else torch.empty(chunk, D, **f32)
    scaled_e = None if sum_VD is None else torch.empty(chunk, D, dtype=e_ND.dtype, device=e_ND.device)
    block = None if comp_VD is None else torch.empty(min(V, kahan_block(D)), D, **f32)
    w = _places(problem, chunk, tile.columns, room)
    target_N = target_logit(e_ND, c_VD, bias_V, codes_N, softcap)
    _, _, scale_N, own_N = tokens

    def steps(n: int) -> Callable[[int], None]:
        """step(first): the work on tokens first to first + n."""
        w_n = w.rows(n)
        s_nD, x_nD = (None if matrix is None else matrix[:n] for matrix in (scaled_e, de_chunk))
        parts_n = parts[: splits[n] * n].view(splits[n], n)
        of_classes, of_tokens = exponentials(problem, target_N, w_n, s_nD, parts_n, tile_references, tuple(tokens))
        finish = None if de_ND is None else hidden_gradient(x_nD, scale_N, own_N, c_VD, codes_N, de_ND)
        of_targets = target_entries(w_n, scale_N, own_N, codes_N)

        def step(first: int) -> None:
            of_classes(first)
            of_tokens(first)
            if de_ND is not None:
                for classes, w_nv in w_n.parts():
                    product_into(w_nv, c_VD[classes], x_nD, add=classes.start > 0)
                finish(first)
            if sum_VD is None:
                return
            of_targets(first)
            if block is not None:
                kahan_product(w_n.left, s_nD, sum_VD, comp_VD, block, transposed=True, add=first > 0)
            elif n == N:
                _from_all_tokens(w_n, s_nD, sum_VD)
            else:
                for classes, w_nv in w_n.parts():
                    product_into(w_nv, s_nD, sum_VD[classes], transposed=True, add=first > 0)

        return step

    in_chunks(N, chunk, steps)


def _places(problem: Problem, chunk: int, columns: int, room: torch.Tensor | None) -> Kept:
    """Memory for a chunk's w: in `room` as many classes as cce/plans.py says, the others in memory of their own."""
    (N, D), V, dtype = problem.e_ND.shape, problem.c_VD.shape[0], problem.e_ND.dtype
    L = 0 if room is None else classes_in_dc(N, chunk, D, V, columns)

    def place(memory: torch.Tensor | None, classes: int) -> torch.Tensor:
        width = padded_width(classes, dtype.itemsize)
        if memory is None:
            memory = torch.empty(chunk * width, dtype=dtype, device=problem.e_ND.device)
        return memory[: chunk * width].view(chunk, width)[:, :classes]

    if L == 0 or L == V:
        return Kept(place(room if L else None, V), None)
    return Kept(place(room, L), place(None, V - L))


def _from_all_tokens(w: Kept, s_ND: torch.Tensor, dc_VD: torch.Tensor) -> None:
    """dc = w^T s, with w.left in its first rows: what comes of that passes through the last ones."""
    if w.right is not None:
        V, L = dc_VD.shape[0], w.left.shape[1]
        product_into(w.left, s_ND, dc_VD[V - L :], transposed=True, add=False)
        dc_VD[:L] = dc_VD[V - L :]
        product_into(w.right, s_ND, dc_VD[L:], transposed=True, add=False)
    else:
        product_into(w.left, s_ND, dc_VD, transposed=True, add=False)
