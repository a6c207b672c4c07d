"""Gradients by slices of the vocabulary: a slice's logits are made again, turned into their gradient, and used up.

For each slice of S classes:
  1. one kernel recomputes the logits and writes G [N, S], their gradient rounded to the inputs' dtype;
  2. dC[slice] = G^T E, one product over all tokens: complete, written once, without locks or compensation;
  3. dE += G C[slice], the only sum over slices: plain, Kahan or fp32 (cce/presets.py).

G lies in memory of gradients that is not written yet, where that holds more than the workspace: in the rows of dC that later
slices will write, so the first slices are wide and few; and in dE's, while its sum is kept elsewhere in fp32.
"""

import torch
import triton

from cce.kernels.filter import kept_tiles, survivors
from cce.kernels.gradient import logit_gradient, tiles_of_tokens
from cce.kernels.logits import addressable
from cce.kernels.product import add_product, block_rows, kahan_product, product_into
from cce.plans import default_workspace_mib, slices, summed_in
from cce.presets import GradientMode
from cce.targets import IGNORED
from cce.tiles import BIAS_PARTS_BYTES, MIB, architecture, filter_tile


def _power_of_two_scale(dloss_N: torch.Tensor, dlse_N: torch.Tensor | None, codes_N: torch.Tensor) -> torch.Tensor:
    """fp32 scalar: the power of two next to the largest upstream gradient; fp16 has no room for p / N at large N."""
    magnitude_N = dloss_N.abs() if dlse_N is None else torch.maximum(dloss_N.abs(), dlse_N.abs())
    largest = magnitude_N.masked_fill(codes_N == IGNORED, 0).max()
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.exp2(torch.floor(torch.log2(torch.where(usable, largest, 1.0)))), 1.0)


def mib(*tensors: torch.Tensor | None) -> float:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None) / MIB


def backward_parts(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    lse_N: torch.Tensor,
    nll_N: torch.Tensor,
    maxima: torch.Tensor,
    dloss_N: torch.Tensor,
    dlse_N: torch.Tensor | None,
    softcap: float | None,
    label_smoothing: float,
    mode: GradientMode,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    workspace_mib: float | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dE, dC, dbias): see cce/blockwise.py. maxima: tile_maxima of forward_parts where the mode filters.

    Beyond the gradients it takes at most workspace_mib (None: cce/plans.py: default_workspace_mib), or what dE's sum and
    128 classes of G take where that is more.
    """
    need_e, need_c, need_bias = needs
    (N, D), V, device = e_ND.shape, c_VD.shape[0], e_ND.device
    if N == 0:
        return (
            torch.zeros(0, D, dtype=dtypes[0], device=device) if need_e else None,
            torch.zeros(V, D, dtype=dtypes[1], device=device) if need_c else None,
            torch.zeros(V, dtype=torch.float32, device=device) if need_bias else None,
        )
    e_ND, c_VD = addressable(e_ND), addressable(c_VD)
    padded, dtype, itemsize = e_ND.shape[1], e_ND.dtype, e_ND.element_size()
    granule = filter_tile(architecture(device, dtype))[1]
    filter_e, filter_c = mode.filter_e and need_e, mode.filter_c and need_c

    de_ND = torch.empty(N, padded, dtype=dtypes[0], device=device) if need_e else None
    dc_VD = torch.empty(V, padded, dtype=dtypes[1], device=device) if need_c else None
    dbias_V = torch.empty(V, dtype=torch.float32, device=device) if need_bias else None

    # What dE's sum takes beside dE: its fp32 copy, or the rounding errors and the block that the products go through.
    workspace = workspace_mib
    if workspace is None:
        workspace = default_workspace_mib(N, padded, mode.accumulation) + mib(maxima)
    accumulation = summed_in(N, padded, mode.accumulation, workspace, mib(maxima))
    fp32_sum = need_e and accumulation == "fp32" and dtypes[0] != torch.float32
    sum_ND = torch.empty(N, padded, dtype=torch.float32, device=device) if fp32_sum else de_ND
    comp_ND = block = None
    if need_e and accumulation == "kahan" and dtypes[0] != torch.float32:
        comp_ND = torch.empty_like(de_ND)
        if not filter_e and dtype != torch.float16:
            block = torch.empty(min(N, block_rows(padded)), padded, dtype=torch.float32, device=device)

    taken = mib(maxima, comp_ND, block, sum_ND if fp32_sum else None) + (BIAS_PARTS_BYTES / MIB if need_bias else 0)
    free = workspace - taken
    per_class = N * itemsize / MIB
    buffer_classes = min(max(1, int(free / per_class) // granule), triton.cdiv(V, granule)) * granule
    buffer = None
    if fp32_sum and mib(de_ND) >= buffer_classes * per_class:
        buffer = de_ND.view(-1).view(dtype)
        buffer_classes = buffer.numel() // N // granule * granule
    elif need_e or need_c:
        buffer = torch.empty(buffer_classes * N, dtype=dtype, device=device)
    bias_parts = widest = None
    if need_bias:
        tiles_n = tiles_of_tokens(e_ND)
        widest = max(1, BIAS_PARTS_BYTES // (4 * tiles_n * granule)) * granule
        bias_parts = torch.empty(
            tiles_n, min(widest, triton.cdiv(V, granule) * granule), dtype=torch.float32, device=device
        )
    c_itemsize = dc_VD.element_size() if need_c else None
    walk = slices(N, padded, V, granule, buffer_classes, itemsize, c_itemsize, widest)

    expm1_N = torch.expm1(-nll_N)
    decided = kept = None
    if filter_e or filter_c:
        decided = kept_tiles(maxima, codes_N, lse_N, expm1_N, mode.filter_eps, label_smoothing / V)
        # A tile is visited unless no product will read it.
        unfiltered = (need_e and not filter_e) or (need_c and not filter_c) or need_bias
        kept = None if unfiltered else decided

    scale = _power_of_two_scale(dloss_N, dlse_N, codes_N) if dtype == torch.float16 else None
    if scale is not None:
        dloss_N = dloss_N / scale
        dlse_N = None if dlse_N is None else dlse_N / scale

    g_Nw = launch = prepared = None
    for v0, w, in_dc in walk:
        # Slices of one buffer and width differ by their first class only: small models wait for the host.
        if in_dc or prepared != w:
            if need_e or need_c:
                columns = triton.cdiv(w, granule) * granule
                place = dc_VD[v0 + w :].view(-1).view(dtype) if in_dc else buffer
                g_Nw = place[: N * columns].view(N, columns)[:, :w]
            launch = logit_gradient(
                e_ND, c_VD, bias_V, codes_N, lse_N, expm1_N, dloss_N, dlse_N, softcap, label_smoothing, g_Nw, bias_parts,
                kept, w,
            )  # fmt: skip
            prepared = None if in_dc else w
        launch(v0)
        tiles = None if decided is None else decided[:, v0 // granule : triton.cdiv(v0 + w, granule)]
        if need_bias:
            torch.sum(bias_parts[:, :w], 0, out=dbias_V[v0 : v0 + w])
        if need_c:
            dc_wD = dc_VD[v0 : v0 + w]
            if not filter_c and scale is None:
                product_into(g_Nw, e_ND, dc_wD, transposed=True, add=False)
            else:
                of_classes = survivors(tiles.t().contiguous()) if filter_c else None
                add_product(g_Nw, e_ND, dc_wD, transposed=True, add=False, kept=of_classes, factor=scale)
        if need_e:
            c_wD, add = c_VD[v0 : v0 + w], v0 > 0
            if block is not None:
                kahan_product(g_Nw, c_wD, sum_ND, comp_ND, block, add=add)
            elif not filter_e and scale is None:
                product_into(g_Nw, c_wD, sum_ND, add=add)
            else:
                of_tokens = survivors(tiles) if filter_e else None
                add_product(g_Nw, c_wD, sum_ND, add=add, comp_MC=comp_ND, kept=of_tokens, factor=scale)
    if need_bias and scale is not None:
        dbias_V *= scale
    if fp32_sum:
        de_ND.copy_(sum_ND)
    if padded != D:
        de_ND, dc_VD = (None if matrix is None else matrix[:, :D].contiguous() for matrix in (de_ND, dc_VD))
    return de_ND, dc_VD, dbias_V
