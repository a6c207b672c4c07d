"""The gradient of the logits for a slice of the vocabulary, from logits that are computed again."""

import torch
import triton
import triton.language as tl

from cce.kernels.epilogues import IGNORED_CODE, logit_gradients, seldom_in, upstream_of
from cce.kernels.launch import Launch
from cce.kernels.logits import descriptor, grouped, precision, raw_logits, store_tile, stored_columns
from cce.tiles import Tile, architecture, gain, logits_tile, vocabulary_splits


# One program makes one tile of G, for `width` classes from first_v on: logit_gradients. G is rounded once, when it is stored.
# FILTER: a tile whose byte in Kept is 0 is left alone, unread and unwritten.
# Column sums of the unrounded G go to BiasPart, one row per tile of tokens, and are added in a fixed order afterwards.
# What is stored for classes past V and tokens past N is cut off by the descriptor or by the products' ranges.
@triton.jit
def _logit_gradient_kernel(
    E, C, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, BiasPart, Kept,
    N, V, width, stride_bias, stride_kept, softcap, smoothing, uniform, first_v,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    NEED_BIAS: tl.constexpr, NEED_G: tl.constexpr, FILTER: tl.constexpr, GAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_n, tile_v = grouped(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(width, BLOCK_V), GROUP)
    n0 = tile_n * BLOCK_N
    v0 = first_v + tile_v * BLOCK_V
    offs_n = n0 + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    code = tl.load(Codes + offs_n, mask=in_n, other=IGNORED_CODE)
    if FILTER:
        if tl.load(Kept + tile_n * stride_kept + v0 // BLOCK_V) == 0:
            return
    g = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    if tl.max(code, 0) != IGNORED_CODE:
        z = raw_logits(E, C, n0, v0, D, BLOCK_N, BLOCK_V, BLOCK_D, PRECISION)
        lse2, dloss, dlse = upstream_of(Lse, Dloss, Dlse, code, offs_n, in_n, HAS_DLSE)
        g = logit_gradients(
            z, seldom_in(code, v0, BLOCK_V), Bias, Expm1, lse2, dloss, dlse, code, offs_n, v0 + tl.arange(0, BLOCK_V), V,
            softcap, smoothing, uniform, HAS_BIAS, HAS_SOFTCAP, HAS_DLSE, HAS_SMOOTHING, GAIN,
        )  # fmt: skip
    if NEED_BIAS:
        offs_w = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        part = BiasPart + tl.cast(tile_n, tl.int64) * stride_bias + offs_w
        tl.store(part, tl.sum(g, 0), mask=offs_w < width)
    if NEED_G:
        store_tile(G, g, n0, tile_v * BLOCK_V, BLOCK_N, BLOCK_V)


def logit_gradient(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    lse_N: torch.Tensor,
    expm1_N: torch.Tensor,
    dloss_N: torch.Tensor,
    dlse_N: torch.Tensor | None,
    softcap: float | None,
    smoothing: float,
    g_Nw: torch.Tensor | None,
    bias_parts: torch.Tensor | None,
    kept: torch.Tensor | None,
    width: int,
) -> Launch:
    """launch(v0) fills g_Nw [N, >= width] for classes v0 to v0 + width, and bias_parts [tiles of tokens, >= width] fp32; None: not
    wanted.

    kept [filter tiles of tokens, filter tiles of all classes] uint8: tiles with 0 stay unwritten. expm1_N is expm1(-nll).
    """
    (N, D), V, arch = e_ND.shape, c_VD.shape[0], architecture(e_ND.device, e_ND.dtype)
    arguments = (bias_V, codes_N, lse_N, expm1_N, dloss_N, dlse_N)
    numbers = (softcap or 1.0, smoothing, smoothing / V)
    flags = dict(
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None, HAS_DLSE=dlse_N is not None,
        HAS_SMOOTHING=smoothing > 0,
    )  # fmt: skip
    if arch == "hopper" and bias_parts is None and kept is None:
        from cce.kernels import hopper

        tile = logits_tile(e_ND.dtype, D, arch, stored=True)
        splits = vocabulary_splits(N, width, tile, arch)
        return hopper.logit_gradient(e_ND, c_VD, g_Nw, tile, (*arguments, N, V, width, *numbers, splits), flags)
    tile = _plain_tile(e_ND)
    return Launch(
        _logit_gradient_kernel,
        (triton.cdiv(N, tile.rows) * triton.cdiv(width, tile.columns),),
        (
            descriptor(e_ND, tile.rows, tile.depth), descriptor(c_VD, tile.columns, tile.depth),
            None if g_Nw is None else descriptor(g_Nw, tile.rows, stored_columns(tile.columns)),
            *arguments, bias_parts, kept, N, V, width,
            0 if bias_parts is None else bias_parts.stride(0), 0 if kept is None else kept.stride(0), *numbers,
        ),
        dict(
            D=D, BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_D=tile.depth, GROUP=tile.group, **flags,
            NEED_BIAS=bias_parts is not None, NEED_G=g_Nw is not None, FILTER=kept is not None,
            GAIN=gain(D, e_ND.device, e_ND.dtype), PRECISION=precision(e_ND.dtype),
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _plain_tile(e_ND: torch.Tensor) -> Tile:
    """Of the kernel above, which filters and sums for a bias on Hopper, too."""
    arch = architecture(e_ND.device, e_ND.dtype)
    return logits_tile(e_ND.dtype, e_ND.shape[1], "other" if arch == "hopper" else arch, stored=True)


def tiles_of_tokens(e_ND: torch.Tensor) -> int:
    """Rows of bias_parts."""
    return triton.cdiv(e_ND.shape[0], _plain_tile(e_ND).rows)
