"""Loss and gradients in one pass over chunks of tokens: exponentials are kept instead of computed again, 3 products in all.

For each chunk of n tokens:
  1. one kernel computes the logits and keeps w = exp(z - reference) [n, V] in bf16, 0 for each token's target, with the
     sums of the unrounded w; a small one makes of them loss, lse, and per token the scale of w and the target's entry, own;
  2. dE = scale (w C) + own c_target: one product over the whole vocabulary, finished and rounded once;
  3. dC += w^T (scale e): the only sum over chunks: Kahan or fp32 (cce/presets.py).
At the end the targets' entries, own e, are added to their rows of dC, and these rounded. They never pass through bf16: what a
target's entry loses to rounding is nothing, however close to 1 its probability is.

Where one chunk is all tokens there is no sum: rows of dC pass through a block of fp32.

w lies in dC's own memory as far as there is room: beside dC's sum in fp32 elsewhere, or, without a sum, the last classes' in
front of the rows of dC that are made of it.
"""

from collections.abc import Callable

import torch
import triton

from cce.kernels.finishing import TokensByTarget, hidden_gradient
from cce.kernels.kept import Kept, exponentials
from cce.kernels.launch import in_chunks
from cce.kernels.problem import Problem
from cce.kernels.product import block_rows, kahan_product, product_into
from cce.kernels.target_logit import target_logit
from cce.plans import classes_in_dc, one_pass_splits, product_rows
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
    e_ND, c_VD, bias_V, codes_N, _, softcap, _ = problem
    (N, D), V = e_ND.shape, c_VD.shape[0]
    of_all = chunk == N
    adds_up = dc_VD is not None and not of_all and dc_VD.dtype != torch.float32
    fp32_sum = adds_up and accumulation == "fp32"
    arch = architecture(e_ND.device, e_ND.dtype)
    tile = logits_tile(e_ND.dtype, D, arch, stored=True)
    f32 = dict(dtype=torch.float32, device=e_ND.device)
    sum_VD = torch.empty_like(dc_VD, dtype=torch.float32) if fp32_sum else dc_VD
    comp_VD = torch.empty_like(dc_VD) if adds_up and accumulation == "kahan" else None
    block = None if comp_VD is None else torch.empty(min(V, block_rows(D)), D, **f32)
    # While dC's sum is kept elsewhere, or there is none, its own memory has room for exponentials.
    has_room = dc_VD is not None and (fp32_sum or of_all)
    w = _places(problem, chunk, tile.columns, dc_VD.view(-1).view(e_ND.dtype) if has_room else None)
    tile_references = torch.empty(triton.cdiv(V, tile.columns), chunk, **f32)
    x_rows = 0 if de_ND is None else chunk
    if of_all and dc_VD is not None:
        x_rows = max(chunk, min(V, block_rows(D)))
    x = torch.empty(x_rows, D, **f32)
    scaled_e = None if dc_VD is None else torch.empty(chunk, D, dtype=e_ND.dtype, device=e_ND.device)
    target_N = target_logit(e_ND, c_VD, bias_V, codes_N, softcap)
    _, _, scale_N, own_N = tokens

    def steps(n: int) -> Callable[[int], None]:
        """step(first): the work on tokens first to first + n."""
        w_n = w.rows(n)
        s_nD, x_nD = None if scaled_e is None else scaled_e[:n], x[:n]
        parts = torch.empty(one_pass_splits(n, V, D, arch), n, **f32)
        of_classes, of_tokens = exponentials(problem, target_N, w_n, s_nD, parts, tile_references, tuple(tokens))
        finish = None if de_ND is None else hidden_gradient(x_nD, scale_N, own_N, c_VD, codes_N, de_ND)

        def step(first: int) -> None:
            of_classes(first)
            of_tokens(first)
            if de_ND is not None:
                for i, (classes, w_nv) in enumerate(w_n.parts()):
                    product_into(w_nv, c_VD[classes], x_nD, add=i > 0)
                finish(first)
            if block is not None:
                kahan_product(w_n.left, s_nD, sum_VD, comp_VD, block, transposed=True, add=first > 0)
            elif dc_VD is not None and not of_all:
                for classes, w_nv in w_n.parts():
                    product_into(w_nv, s_nD, sum_VD[classes], transposed=True, add=first > 0)

        return step

    in_chunks(N, chunk, steps)
    if dc_VD is not None:
        of_targets = TokensByTarget(e_ND, own_N, codes_N, V)
        if of_all:
            _of_all_tokens(w, scaled_e, x, of_targets, dc_VD)
        else:
            of_targets.class_rows(sum_VD, comp_VD, 0, dc_VD)


def _places(problem: Problem, chunk: int, columns: int, room: torch.Tensor | None) -> Kept:
    """Memory for a chunk's w: in `room` as many classes, the last ones, as cce/plans.py says; the others in memory of their own."""
    (N, D), V, dtype = problem.e_ND.shape, problem.c_VD.shape[0], problem.e_ND.dtype
    in_room = 0 if room is None else classes_in_dc(N, chunk, D, V, columns)

    def place(memory: torch.Tensor | None, classes: int) -> torch.Tensor:
        width = padded_width(classes, dtype.itemsize)
        if memory is None:
            memory = torch.empty(chunk * width, dtype=dtype, device=problem.e_ND.device)
        return memory[: chunk * width].view(chunk, width)[:, :classes]

    if in_room in (0, V):
        return Kept(place(room if in_room else None, V), None)
    return Kept(place(None, V - in_room), place(room, in_room))


def _of_all_tokens(
    w: Kept, s_ND: torch.Tensor, x: torch.Tensor, of_targets: TokensByTarget, dc_VD: torch.Tensor
) -> None:
    """dc = w^T s + the targets' entries, rows by rows through x [rows, D] fp32; first the classes whose w lies in dc's memory."""
    rows = product_rows(*x.shape)
    for classes, w_Nv in reversed(w.parts()):
        for first in range(classes.start, classes.stop, rows):
            stop = min(first + rows, classes.stop)
            x_vD = x[: stop - first]
            product_into(w_Nv[:, first - classes.start : stop - classes.start], s_ND, x_vD, transposed=True, add=False)
            of_targets.class_rows(x_vD, None, first, dc_VD[first:stop])
