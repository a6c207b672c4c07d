"""Gradient filtering (paper, section 4.3), decided before anything is recomputed.

The forward pass keeps, per token and tile of classes, the largest logit (rounded up). Once the lse is known, so are the
tiles in which some |p - onehot| reaches eps: only those are visited by the backward pass.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cce.kernels.epilogues import IGNORED_CODE, LOG2E
from cce.tiles import architecture, filter_tile


# One program decides BLOCK_T tiles of classes for one tile of tokens. Not-smaller instead of larger-or-equal: NaN is kept.
# The target's own entry is judged apart, by |p - 1| = -expm1(-nll).
@triton.jit
def _kept_kernel(
    TileMaxima, Codes, Lse, Expm1, Kept, N, tiles_v, log2_eps, eps,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    code = tl.load(Codes + offs_n, mask=offs_n < N, other=IGNORED_CODE)
    active = code != IGNORED_CODE
    lse2 = tl.load(Lse + offs_n, mask=active, other=0.0) * LOG2E
    at = offs_t.to(tl.int64)[:, None] * N + offs_n[None, :]
    maximum = tl.load(TileMaxima + at, mask=active[None, :] & (offs_t < tiles_v)[:, None], other=float("-inf"))
    rest = (maximum.to(tl.float32) * LOG2E - lse2[None, :] < log2_eps) == 0
    wrong = (tl.load(Expm1 + offs_n, mask=active, other=0.0) > -eps) == 0
    own = (code[None, :] // BLOCK_V == offs_t[:, None]) & (code >= 0)[None, :] & wrong[None, :]
    kept = tl.max(((rest | own) & active[None, :]).to(tl.int32), 1)
    tl.store(Kept + tl.program_id(0) * tiles_v + offs_t, kept.to(tl.uint8), mask=offs_t < tiles_v)


@dataclass(frozen=True)
class Survivors:
    """For each row of tiles the columns that are kept: count [rows] and order [rows, columns] int32, kept ones first."""

    count: torch.Tensor
    order: torch.Tensor


def kept_tiles(
    maxima: torch.Tensor,
    codes_N: torch.Tensor,
    lse_N: torch.Tensor,
    expm1_N: torch.Tensor,
    eps: float,
    uniform: float,
) -> torch.Tensor:
    """[tiles of tokens, tiles of classes] uint8: 1 where some |p - q| >= eps, by the rounded-up maxima.

    uniform: what label smoothing puts on every class. With it, tiles that hold a target are always kept, and all tiles once it
    reaches eps.
    """
    rows, columns = filter_tile(architecture(maxima.device, torch.bfloat16))
    tiles_v, N = maxima.shape
    tiles_n, block = triton.cdiv(N, rows), 16
    kept = torch.empty(tiles_n, tiles_v, dtype=torch.uint8, device=maxima.device)
    log2_eps = math.log2(eps) if eps > uniform else float("-inf")
    _kept_kernel[(tiles_n, triton.cdiv(tiles_v, block))](
        maxima, codes_N, lse_N, expm1_N, kept, N, tiles_v, log2_eps, 0.0 if uniform else eps,
        BLOCK_N=rows, BLOCK_V=columns, BLOCK_T=block,
    )  # fmt: skip
    return kept


def survivors(kept: torch.Tensor) -> Survivors:
    """Along the last axis of kept, which may have axes before it."""
    order = kept.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return Survivors(kept.sum(-1, dtype=torch.int32), order)
