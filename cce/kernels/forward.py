"""Fused linear log-sum-exp and the target's logit (paper, sections 4.1 and 4.2), without locks or atomics."""

import torch
import triton
import triton.language as tl

from cce.kernels.epilogues import IGNORED_CODE, LN2, LOWEST, add_exponentials
from cce.kernels.logits import addressable, descriptor, grouped, part_of, precision, raw_logits
from cce.kernels.target_logit import target_logit
from cce.tiles import (
    PARTIALS_BYTES,
    Architecture,
    architecture,
    filter_tile,
    gain,
    interpreting,
    logits_tile,
    vocabulary_splits,
)


# One program walks one split of the vocabulary (several tiles) for one tile of tokens: per tile the logits (fp32
# accumulators), then what add_exponentials says. Only reference + log2(sum) is written: splits x N fp32 numbers, merged by the
# second kernel in a fixed order: two runs give the same bits.
@triton.jit
def _log_sum_exp_kernel(
    E, C, Bias, Codes, Part, PartTotal, TileMaxima, N, V, softcap, splits,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NEED_TOTAL: tl.constexpr, NEED_MAXIMA: tl.constexpr,
    MAXIMA_V: tl.constexpr, GAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_n, split = grouped(tl.program_id(0), tl.cdiv(N, BLOCK_N), splits, GROUP)
    n0 = tile_n * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    code = tl.load(Codes + offs_n, mask=in_n, other=IGNORED_CODE)
    reference = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    first, last = part_of(split, tl.cdiv(V, BLOCK_V), splits)
    if tl.max(code, 0) == IGNORED_CODE:  # a tile of ignored tokens costs nothing
        last = first
    for tile_v in tl.range(first, last):
        v0 = tile_v * BLOCK_V
        z = raw_logits(E, C, n0, v0, D, BLOCK_N, BLOCK_V, BLOCK_D, PRECISION)
        reference, exp_sum, total = add_exponentials(
            z, reference, exp_sum, total, Bias, TileMaxima, code, offs_n, in_n, v0 + tl.arange(0, BLOCK_V), v0, N, V,
            softcap, BLOCK_V, HAS_BIAS, HAS_SOFTCAP, NEED_TOTAL, NEED_MAXIMA, MAXIMA_V, GAIN,
        )  # fmt: skip
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


def _log_sum_exp(e_ND, c_VD, bias_V, codes_N, softcap, need_mean, maxima, arch: Architecture):
    (N, D), V, device = e_ND.shape, c_VD.shape[0], e_ND.device
    tile = logits_tile(e_ND.dtype, D, arch, stored=False)
    token_tiles, partials = triton.cdiv(N, tile.rows), 2 if need_mean else 1
    splits = vocabulary_splits(N, V, tile, arch, PARTIALS_BYTES // (4 * partials * N))
    part = torch.empty(splits, N, dtype=torch.float32, device=device)
    total = torch.empty_like(part) if need_mean else None
    rest_N = torch.empty(N, dtype=torch.float32, device=device)
    mean_N = torch.zeros(N, dtype=torch.float32, device=device)
    arguments = (bias_V, codes_N, part, total, maxima, N, V, softcap or 1.0, splits)
    flags = dict(
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None, NEED_TOTAL=need_mean,
        NEED_MAXIMA=maxima is not None, MAXIMA_V=filter_tile(arch)[1],
    )  # fmt: skip
    if arch == "hopper":
        from cce.kernels import hopper

        hopper.log_sum_exp(e_ND, c_VD, tile, arguments, flags)
    else:
        _log_sum_exp_kernel[(token_tiles * splits,)](
            descriptor(e_ND, tile.rows, tile.depth), descriptor(c_VD, tile.columns, tile.depth), *arguments,
            D=D, BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_D=tile.depth, GROUP=tile.group, **flags,
            GAIN=gain(D, device, e_ND.dtype), PRECISION=precision(e_ND.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    block = 32 if interpreting() else 128
    _merge_kernel[(triton.cdiv(N, block),)](
        part, total, rest_N, mean_N, N, V, splits, BLOCK_N=block, NEED_TOTAL=need_mean
    )
    return rest_N, mean_N


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
    N, arch = e_ND.shape[0], architecture(e_ND.device, e_ND.dtype)
    tiles = triton.cdiv(c_VD.shape[0], filter_tile(arch)[1])
    maxima = torch.empty(tiles if need_maxima else 0, N, dtype=torch.float16, device=e_ND.device)
    if N == 0:
        empty = torch.empty(0, dtype=torch.float32, device=e_ND.device)
        return empty, empty.clone(), empty.clone(), maxima
    e_ND, c_VD = addressable(e_ND), addressable(c_VD)
    rest_N, mean_N = _log_sum_exp(
        e_ND, c_VD, bias_V, codes_N, softcap, need_mean, maxima if need_maxima else None, arch
    )
    return rest_N, target_logit(e_ND, c_VD, bias_V, codes_N, softcap), mean_N, maxima
