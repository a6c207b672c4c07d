"""Gradients by slices of the vocabulary: a slice's logits are made again, turned into their gradient, and used up.

For each slice of S classes:
  1. one kernel recomputes the logits and writes G [N, S], their gradient rounded to the inputs' dtype (workspace);
  2. dC[slice] = G^T E, one product over all tokens: complete, written once, without locks or compensation;
  3. dE += G C[slice], the only sum over slices: plain, Kahan or fp32 (cce/presets.py).
"""

import torch
import triton
import triton.language as tl

from cce.kernels.logits import LOG2E, grouped, interpreting, precision, raw_logits, rows_contiguous, tanh
from cce.kernels.product import add_product
from cce.presets import GradientMode
from cce.targets import IGNORED
from cce.tiles import Tile, filter_tile, logits_tile, slice_width

_IGNORED = tl.constexpr(IGNORED)


# One program makes one tile of G = ((p - q) dloss + p dlse) softcap'; q = (1 - smoothing) onehot + smoothing / V.
# p = 2^(z log2e - lse log2e) in fp32; the target's entry of p - onehot is expm1(-nll) from the forward, so 1 - p keeps
# its relative precision as p -> 1 and nothing is subtracted after rounding. G is rounded once, when it is stored.
# FILTER: Kept gets one byte per tile, 1 if any |p - q| >= eps; a tile that no product will read is not stored.
# Column sums of the unrounded G go to BiasPart, one row per tile of tokens, and are added in a fixed order afterwards.
@triton.jit
def _logit_gradient_kernel(
    E, C, Bias, Codes, Lse, Expm1, Dloss, Dlse, G, BiasPart, Kept,
    N, V, first_v, width, stride_e, stride_c, stride_g, stride_bias, stride_kept, softcap, smoothing, uniform, eps,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    NEED_BIAS: tl.constexpr, NEED_G: tl.constexpr, FILTER: tl.constexpr, STORE_DROPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile_n, tile_v = grouped(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(width, BLOCK_V), GROUP)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_w = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_v = first_v + offs_w
    in_n = offs_n < N
    in_w = offs_w < width
    code = tl.load(Codes + offs_n, mask=in_n, other=_IGNORED)
    active = code != _IGNORED
    g = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    kept = 0
    if tl.max(code, 0) != _IGNORED:
        z = raw_logits(
            E, C, Bias, tl.minimum(offs_n, N - 1), tl.minimum(offs_v, V - 1), stride_e, stride_c,
            D, BLOCK_N, BLOCK_V, BLOCK_D, HAS_BIAS, PRECISION,
        )  # fmt: skip
        if HAS_SOFTCAP:
            t = tanh(z / softcap)
            z = softcap * t
        lse2 = tl.load(Lse + offs_n, mask=in_n, other=0.0) * LOG2E
        p = tl.exp2(z * LOG2E - lse2[:, None])
        own = offs_v[None, :] == code[:, None]
        y = tl.where(own, tl.load(Expm1 + offs_n, mask=in_n, other=0.0)[:, None], p)
        if HAS_SMOOTHING:
            y = tl.where(own, y + smoothing, y) - uniform
        valid = active[:, None] & in_w[None, :]
        y = tl.where(valid, y, 0.0)
        if FILTER:
            kept = tl.max(tl.max((tl.abs(y) >= eps).to(tl.int32), 1), 0)
        dloss = tl.load(Dloss + offs_n, mask=active, other=0.0)
        if HAS_DLSE:
            # (p - q) dloss + p dlse = (p - q) (dloss + dlse) + q dlse
            dlse = tl.load(Dlse + offs_n, mask=active, other=0.0)
            g = y * (dloss + dlse)[:, None] + tl.where(own & valid, dlse[:, None] * (1 - smoothing), 0.0)
            if HAS_SMOOTHING:
                g += tl.where(valid, dlse[:, None] * uniform, 0.0)
        else:
            g = y * dloss[:, None]
        if HAS_SOFTCAP:
            g *= 1 - t * t
    if NEED_BIAS:
        part = BiasPart + tile_n.to(tl.int64) * stride_bias + offs_w
        tl.store(part, tl.sum(g, 0), mask=in_w)
    if FILTER:
        tl.store(Kept + tile_n * stride_kept + tile_v, kept.to(tl.uint8))
    if NEED_G:
        if STORE_DROPPED or kept != 0:
            first = tl.cast(tile_n, tl.int64) * BLOCK_N * stride_g + tile_v * BLOCK_V
            at = tl.arange(0, BLOCK_N)[:, None] * stride_g + tl.arange(0, BLOCK_V)[None, :]
            tl.store(G + first + at, g.to(G.dtype.element_ty), mask=in_n[:, None] & in_w[None, :])


def _power_of_two_scale(dloss_N: torch.Tensor, dlse_N: torch.Tensor | None, codes_N: torch.Tensor) -> torch.Tensor:
    """fp32 scalar: the power of two next to the largest upstream gradient; fp16 has no room for p / N at large N."""
    magnitude_N = dloss_N.abs() if dlse_N is None else torch.maximum(dloss_N.abs(), dlse_N.abs())
    largest = magnitude_N.masked_fill(codes_N == IGNORED, 0).max()
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.exp2(torch.floor(torch.log2(torch.where(usable, largest, 1.0)))), 1.0)


def _matmul_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> bool:
    """out = a b or out += a b by the vendor's library with fp32 accumulators; False if it has no such product."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        return True
    if out.device.type == "cuda" and torch.version.cuda is not None and hasattr(torch.ops.aten.addmm, "dtype_out"):
        if add:
            torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
        return True
    return False


def _logit_gradient(
    e_ND, c_VD, bias_V, codes_N, lse_N, expm1_N, dloss_N, dlse_N, softcap, smoothing, eps,
    g_NS, bias_parts, kept, v0, width, store_dropped, tile: Tile,
) -> None:  # fmt: skip
    (N, D), V = e_ND.shape, c_VD.shape[0]
    _logit_gradient_kernel[(triton.cdiv(N, tile.rows) * triton.cdiv(width, tile.columns),)](
        e_ND, c_VD, bias_V, codes_N, lse_N, expm1_N, dloss_N, dlse_N, g_NS, bias_parts, kept,
        N, V, v0, width, e_ND.stride(0), c_VD.stride(0), 0 if g_NS is None else g_NS.stride(0),
        0 if bias_parts is None else bias_parts.stride(0), 0 if kept is None else kept.stride(0),
        softcap or 1.0, smoothing, smoothing / V, 0.0 if eps is None else eps,
        D=D, BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_D=tile.depth, GROUP=tile.group,
        HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None, HAS_DLSE=dlse_N is not None,
        HAS_SMOOTHING=smoothing > 0, NEED_BIAS=bias_parts is not None, NEED_G=g_NS is not None,
        FILTER=kept is not None, STORE_DROPPED=store_dropped, PRECISION=precision(e_ND.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def backward_parts(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    lse_N: torch.Tensor,
    nll_N: torch.Tensor,
    dloss_N: torch.Tensor,
    dlse_N: torch.Tensor | None,
    softcap: float | None,
    label_smoothing: float,
    mode: GradientMode,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    workspace_mib: float | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dE, dC, dbias): see cce/blockwise.py. G takes at most workspace_mib, or 128 classes x N where that is more."""
    need_e, need_c, need_bias = needs
    (N, D), V, device = e_ND.shape, c_VD.shape[0], e_ND.device
    if N == 0:
        return (
            torch.zeros(0, D, dtype=dtypes[0], device=device) if need_e else None,
            torch.zeros(V, D, dtype=dtypes[1], device=device) if need_c else None,
            torch.zeros(V, dtype=torch.float32, device=device) if need_bias else None,
        )
    e_ND, c_VD = rows_contiguous(e_ND), rows_contiguous(c_VD)
    interpret = interpreting()
    filter_e, filter_c = mode.filter_e and need_e, mode.filter_c and need_c
    filtered = filter_e or filter_c
    tile = logits_tile(e_ND.dtype, D, interpret, filtered)
    # A dropped tile is stored when a product that is not filtered reads it.
    store_dropped = not filtered or (need_e and not filter_e) or (need_c and not filter_c)
    width = slice_width(N, V, e_ND.element_size(), workspace_mib, granule=filter_tile(interpret)[1])
    width = min(width, triton.cdiv(V, 8) * 8)

    scale = _power_of_two_scale(dloss_N, dlse_N, codes_N) if e_ND.dtype == torch.float16 else None
    if scale is not None:
        dloss_N = dloss_N / scale
        dlse_N = None if dlse_N is None else dlse_N / scale
    expm1_N = torch.expm1(-nll_N)

    g_NS = torch.empty(N, width, dtype=e_ND.dtype, device=device) if need_e or need_c else None
    tiles_n, tiles_v = triton.cdiv(N, tile.rows), triton.cdiv(width, tile.columns)
    kept = torch.empty(tiles_n, tiles_v, dtype=torch.uint8, device=device) if filtered else None
    dc_VD = torch.empty(V, D, dtype=dtypes[1], device=device) if need_c else None
    fp32_sum = mode.accumulation == "fp32" and width < V
    de_ND = torch.empty(N, D, dtype=torch.float32 if fp32_sum else dtypes[0], device=device) if need_e else None
    comp_ND = None
    if need_e and mode.accumulation == "kahan" and width < V and dtypes[0] != torch.float32:
        comp_ND = torch.empty_like(de_ND)
    dbias_V = torch.empty(V, dtype=torch.float32, device=device) if need_bias else None
    bias_parts = torch.empty(tiles_n, width, dtype=torch.float32, device=device) if need_bias else None

    for v0 in range(0, V, width):
        w = min(width, V - v0)
        _logit_gradient(
            e_ND, c_VD, bias_V, codes_N, lse_N, expm1_N, dloss_N, dlse_N, softcap, label_smoothing, mode.filter_eps,
            g_NS, bias_parts, kept, v0, w, store_dropped, tile,
        )  # fmt: skip
        if need_bias:
            torch.sum(bias_parts[:, :w], 0, out=dbias_V[v0 : v0 + w])
        if need_c:
            dc_wD, g_wN = dc_VD[v0 : v0 + w], g_NS[:, :w].t()
            if filter_c or scale is not None or not _matmul_into(g_wN, e_ND, dc_wD, add=False):
                kept_c = kept.t() if filter_c else None
                kept_tile = (tile.columns, tile.rows)
                add_product(g_wN, e_ND, dc_wD, add=False, kept=kept_c, kept_tile=kept_tile, factor=scale)
        if need_e:
            g_Nw, c_wD, add = g_NS[:, :w], c_VD[v0 : v0 + w], v0 > 0
            own_kernel = filter_e or scale is not None or comp_ND is not None
            if own_kernel or not _matmul_into(g_Nw, c_wD, de_ND, add):
                kept_e = kept if filter_e else None
                kept_tile = (tile.rows, tile.columns)
                add_product(g_Nw, c_wD, de_ND, add=add, comp_MC=comp_ND, kept=kept_e, kept_tile=kept_tile, factor=scale)
    if need_bias and scale is not None:
        dbias_V *= scale
    return None if de_ND is None else de_ND.to(dtypes[0]), dc_VD, dbias_V
