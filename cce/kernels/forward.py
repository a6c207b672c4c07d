"""Fused linear log-sum-exp and the target's logit (paper, sections 4.1 and 4.2), without locks or atomics."""

import torch
import triton
import triton.language as tl

from cce.kernels.logits import (
    LN2,
    LOG2E,
    addressable,
    descriptor,
    grouped,
    halves,
    interpreting,
    precision,
    raw_logits,
    rest_logits,
    tanh,
)
from cce.targets import IGNORED, OUT_OF_RANGE
from cce.tiles import Tile, filter_tile, logits_tile, vocabulary_splits

_IGNORED = tl.constexpr(IGNORED)
# Finite start of a running maximum: a tile of nothing but -inf then adds exp(-inf) = 0 instead of nan.
LOWEST = tl.constexpr(-3.0e38)
# A reference stays until a tile's sum of 2^(z - reference) passes this; the sums then have 2^60 to spare in fp32.
LARGE = tl.constexpr(2.0**60)


@triton.jit
def rounded_up(x):
    """fp16 that is never below x: what may be dropped is decided by it. The smallest there is for what lies below it, and NaN."""
    return tl.maximum(x + tl.abs(x) * 0.001 + 1e-4, -65504.0).to(tl.float16)


# One program walks one split of the vocabulary (several tiles) for one tile of tokens: per tile the logits (fp32
# accumulators), then a sum of 2^(z log2e - reference) per token. The reference is not the running maximum: it moves, to the
# maximum, only when a tile's sum grows LARGE. That is as safe, and an element costs one multiply-add, one exp2 and one add.
# Only reference + log2(sum) is written: splits x N fp32 numbers, merged by the second kernel in a fixed order: two runs
# give the same bits. The target's own logit is left out of the sum, so that the loss can be formed as
# log1p(sum exp(z_v - z_target)); it is written apart, from the same accumulators: tensor cores cut off low bits of a sum,
# which shifts all logits of a token alike and cancels in the difference.
# NEED_MAXIMA: TileMaxima gets, per token and filter tile, the largest logit that is not the target's, rounded up.
@triton.jit
def _log_sum_exp_kernel(
    E, C, Bias, Codes, Target, Part, PartTotal, TileMaxima, N, V, softcap, splits,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NEED_TOTAL: tl.constexpr, NEED_MAXIMA: tl.constexpr,
    MAXIMA_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_n, split = grouped(tl.program_id(0), tl.cdiv(N, BLOCK_N), splits, GROUP)
    n0 = tile_n * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    code = tl.load(Codes + offs_n, mask=in_n, other=_IGNORED)
    reference = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    tiles_v = tl.cdiv(V, BLOCK_V)
    first = (split * tiles_v) // splits
    last = ((split + 1) * tiles_v) // splits
    if tl.max(code, 0) == _IGNORED:  # a tile of ignored tokens costs nothing
        last = first
    for tile_v in tl.range(first, last):
        v0 = tile_v * BLOCK_V
        z = raw_logits(E, C, Bias, n0, v0, V, D, BLOCK_N, BLOCK_V, BLOCK_D, HAS_BIAS, PRECISION)
        if HAS_SOFTCAP:
            z = softcap * tanh(z / softcap)
        if NEED_TOTAL:
            total += tl.sum(tl.where((v0 + tl.arange(0, BLOCK_V))[None, :] < V, z, 0.0), 1)
        z = rest_logits(z, Target, code, offs_n, v0, V, BLOCK_V)
        s = tl.sum(tl.exp2(z * LOG2E - reference[:, None]), 1)
        if tl.max(s, 0) > LARGE:
            moved = tl.maximum(reference, tl.max(z, 1) * LOG2E)
            exp_sum = exp_sum * tl.exp2(reference - moved)
            s = tl.sum(tl.exp2(z * LOG2E - moved[:, None]), 1)
            reference = moved
        exp_sum += s
        if NEED_MAXIMA:
            at = TileMaxima + tl.cast(v0 // MAXIMA_V, tl.int64) * N + offs_n
            if BLOCK_V == MAXIMA_V:
                tl.store(at, rounded_up(tl.max(z, 1)), mask=in_n)
            else:
                tl.static_assert(BLOCK_V == 2 * MAXIMA_V)
                left, right = halves(z, BLOCK_N, BLOCK_V)
                tl.store(at, rounded_up(tl.max(left, 1)), mask=in_n)
                tl.store(at + N, rounded_up(tl.max(right, 1)), mask=in_n & (v0 + MAXIMA_V < V))
    out = tl.cast(split, tl.int64) * N + offs_n
    tl.store(Part + out, reference + tl.log2(exp_sum), mask=in_n)
    if NEED_TOTAL:
        tl.store(PartTotal + out, total, mask=in_n)


@triton.jit
def _merge_kernel(Part, PartTotal, Rest, Mean, N, V, splits, BLOCK_N: tl.constexpr, NEED_TOTAL: tl.constexpr):
    """rest = ln of the sum over splits of 2^part."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < N
    maximum = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in range(0, splits):
        at = tl.cast(split, tl.int64) * N + offs_n
        part = tl.load(Part + at, mask=inside, other=LOWEST)
        moved = tl.maximum(maximum, part)
        exp_sum = exp_sum * tl.exp2(maximum - moved) + tl.exp2(part - moved)
        maximum = moved
        if NEED_TOTAL:
            total += tl.load(PartTotal + at, mask=inside, other=0.0)
    tl.store(Rest + offs_n, (maximum + tl.log2(exp_sum)) * LN2, mask=inside)
    if NEED_TOTAL:
        tl.store(Mean + offs_n, total / V, mask=inside)


def _log_sum_exp(e_ND, c_VD, bias_V, codes_N, softcap, need_mean, maxima, tile: Tile):
    (N, D), V, device = e_ND.shape, c_VD.shape[0], e_ND.device
    splits = vocabulary_splits(N, V, tile, partials=2 if need_mean else 1)
    part = torch.empty(splits, N, dtype=torch.float32, device=device)
    total = torch.empty_like(part) if need_mean else None
    rest_N = torch.empty(N, dtype=torch.float32, device=device)
    mean_N = torch.zeros(N, dtype=torch.float32, device=device)
    target_N = torch.zeros(N, dtype=torch.float32, device=device).masked_fill_(codes_N == OUT_OF_RANGE, float("nan"))
    _log_sum_exp_kernel[(triton.cdiv(N, tile.rows) * splits,)](
        descriptor(e_ND, tile.rows, tile.depth), descriptor(c_VD, tile.columns, tile.depth), bias_V, codes_N,
        target_N, part, total, maxima, N, V, softcap or 1.0, splits,
        D=D, BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_D=tile.depth, GROUP=tile.group,
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None, NEED_TOTAL=need_mean,
        NEED_MAXIMA=maxima is not None, MAXIMA_V=filter_tile(interpreting())[1],
        PRECISION=precision(e_ND.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    block = 32 if interpreting() else 128
    _merge_kernel[(triton.cdiv(N, block),)](
        part, total, rest_N, mean_N, N, V, splits, BLOCK_N=block, NEED_TOTAL=need_mean
    )
    return rest_N, target_N, mean_N


def forward_parts(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    softcap: float | None,
    need_mean: bool,
    need_maxima: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rest, target_logit, mean_logit), each [N] fp32, as in cce/blockwise.py, and tile_maxima.

    tile_maxima [filter tiles of the vocabulary, N] fp16, empty unless asked for: no logit of a token in a tile is above it,
    the target's left out. What lies there for ignored tokens is not read.
    """
    N = e_ND.shape[0]
    tiles = triton.cdiv(c_VD.shape[0], filter_tile(interpreting())[1])
    maxima = torch.empty(tiles if need_maxima else 0, N, dtype=torch.float16, device=e_ND.device)
    if N == 0:
        empty = torch.empty(0, dtype=torch.float32, device=e_ND.device)
        return empty, empty.clone(), empty.clone(), maxima
    e_ND, c_VD = addressable(e_ND), addressable(c_VD)
    tile = logits_tile(e_ND.dtype, e_ND.shape[1], interpreting())
    parts = _log_sum_exp(e_ND, c_VD, bias_V, codes_N, softcap, need_mean, maxima if need_maxima else None, tile)
    return *parts, maxima
