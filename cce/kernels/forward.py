"""Fused linear log-sum-exp over the classes that are not the target (paper, section 4.2), without locks or atomics."""

import torch
import triton
import triton.language as tl

from cce.kernels.logits import LOG2E, grouped, interpreting, precision, raw_logits, rows_contiguous, tanh
from cce.kernels.target_logit import target_logit
from cce.targets import IGNORED
from cce.tiles import Tile, logits_tile, vocabulary_splits

_IGNORED = tl.constexpr(IGNORED)
# Finite start of a running maximum: a tile of nothing but -inf then adds exp(-inf) = 0 instead of nan.
_LOWEST = tl.constexpr(-3.0e38)
_LN2 = tl.constexpr(0.6931471805599453)


# One program walks one split of the vocabulary (several tiles) for one tile of tokens: per tile the logits (tl.dot with
# fp32 accumulators), then in the epilogue a running (maximum, sum of exp) per token in base 2. Only that pair is
# written: splits x N x 2 fp32 numbers. Splits are merged by the second kernel in a fixed order: bit-identical runs.
# The target's own logit is left out of the sum, so that the loss can be formed as log1p(sum exp(z_v - z_target)).
@triton.jit
def _log_sum_exp_kernel(
    E, C, Bias, Codes, PartMax, PartSum, PartTotal, N, V, stride_e, stride_c, softcap, splits, tiles_per_split,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NEED_TOTAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_n, split = grouped(tl.program_id(0), tl.cdiv(N, BLOCK_N), splits, GROUP)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_n = tl.minimum(offs_n, N - 1)
    code = tl.load(Codes + offs_n, mask=offs_n < N, other=_IGNORED)
    maximum = tl.full((BLOCK_N,), _LOWEST, dtype=tl.float32)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(V, BLOCK_V))
    if tl.max(code, 0) == _IGNORED:  # a tile of ignored tokens costs nothing
        last = first
    for tile_v in range(first, last):
        offs_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        rows_v = tl.minimum(offs_v, V - 1)
        z = raw_logits(
            E, C, Bias, rows_n, rows_v, stride_e, stride_c, D, BLOCK_N, BLOCK_V, BLOCK_D, HAS_BIAS, PRECISION
        )
        if HAS_SOFTCAP:
            z = softcap * tanh(z / softcap)
        if NEED_TOTAL:
            total += tl.sum(tl.where(offs_v[None, :] < V, z, 0.0), 1)
        z = tl.where((offs_v[None, :] >= V) | (offs_v[None, :] == code[:, None]), -float("inf"), z * LOG2E)
        new = tl.maximum(maximum, tl.max(z, 1))
        exp_sum = exp_sum * tl.exp2(maximum - new) + tl.sum(tl.exp2(z - new[:, None]), 1)
        maximum = new
    out = split.to(tl.int64) * N + offs_n
    tl.store(PartMax + out, maximum, mask=offs_n < N)
    tl.store(PartSum + out, exp_sum, mask=offs_n < N)
    if NEED_TOTAL:
        tl.store(PartTotal + out, total, mask=offs_n < N)


@triton.jit
def _merge_kernel(
    PartMax, PartSum, PartTotal, Rest, Mean, N, V, splits, BLOCK_N: tl.constexpr, NEED_TOTAL: tl.constexpr
):
    """rest = log sum over splits of sum * 2^maximum, in natural logarithms."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < N
    maximum = tl.full((BLOCK_N,), _LOWEST, dtype=tl.float32)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in range(0, splits):
        at = tl.cast(split, tl.int64) * N + offs_n
        part = tl.load(PartMax + at, mask=inside, other=_LOWEST)
        new = tl.maximum(maximum, part)
        exp_sum = exp_sum * tl.exp2(maximum - new) + tl.load(PartSum + at, mask=inside, other=0.0) * tl.exp2(part - new)
        maximum = new
        if NEED_TOTAL:
            total += tl.load(PartTotal + at, mask=inside, other=0.0)
    tl.store(Rest + offs_n, (maximum + tl.log2(exp_sum)) * _LN2, mask=inside)
    if NEED_TOTAL:
        tl.store(Mean + offs_n, total / V, mask=inside)


def log_sum_exp(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    softcap: float | None,
    need_mean: bool,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-sum-exp over the classes that are not the target, mean logit or 0), each [N] fp32; ignored tokens: any."""
    (N, D), V = e_ND.shape, c_VD.shape[0]
    splits, tiles_per_split = vocabulary_splits(N, V, tile, partials=3 if need_mean else 2)
    parts = torch.empty(3 if need_mean else 2, splits, N, dtype=torch.float32, device=e_ND.device)
    total = parts[2] if need_mean else None
    rest_N = torch.empty(N, dtype=torch.float32, device=e_ND.device)
    mean_N = torch.zeros(N, dtype=torch.float32, device=e_ND.device)
    _log_sum_exp_kernel[(triton.cdiv(N, tile.rows) * splits,)](
        e_ND, c_VD, bias_V, codes_N, parts[0], parts[1], total, N, V, e_ND.stride(0), c_VD.stride(0), softcap or 1.0,
        splits, tiles_per_split,
        D=D, BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_D=tile.depth, GROUP=tile.group,
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None, NEED_TOTAL=need_mean,
        PRECISION=precision(e_ND.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    block = 32 if interpreting() else 128
    _merge_kernel[(triton.cdiv(N, block),)](
        parts[0], parts[1], total, rest_N, mean_N, N, V, splits, BLOCK_N=block, NEED_TOTAL=need_mean
    )
    return rest_N, mean_N


def forward_parts(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    softcap: float | None,
    need_mean: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rest, target_logit, mean_logit), each [N] fp32: see cce/blockwise.py."""
    N, D = e_ND.shape
    if N == 0:
        empty = torch.empty(0, dtype=torch.float32, device=e_ND.device)
        return empty, empty.clone(), empty.clone()
    e_ND, c_VD = rows_contiguous(e_ND), rows_contiguous(c_VD)
    rest_N, mean_N = log_sum_exp(
        e_ND, c_VD, bias_V, codes_N, softcap, need_mean, logits_tile(e_ND.dtype, D, interpreting())
    )
    return rest_N, target_logit(e_ND, c_VD, bias_V, codes_N, softcap), mean_N
