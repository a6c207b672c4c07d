"""Loss and gradients in one pass over chunks of tokens: exponentials are kept instead of computed again, 3 products in all.

For each chunk of n tokens:
  1. one kernel computes the logits and keeps w = exp(z - reference) [n, V] in bf16, 0 for each token's target, with the
     sums of the unrounded w; a small one makes of them loss, lse, and per token the scale of w and the target's entry;
  2. dE = scale (w C) + own c_target: one product over the whole vocabulary, finished and rounded once;
  3. dC += w^T (scale e): the only sum over chunks: Kahan or fp32 (cce/presets.py).
At the end the targets' entries, own e, are added to their rows of dC. They never pass through bf16: what a target's entry
loses to rounding is nothing, however close to 1 its probability is.

The gradients are those of the loss with the upstream gradient 1 (cce/function.py multiplies it in).
"""

import torch
import triton

from cce.kernels.exponentials import exponentials
from cce.kernels.finishing import add_target_rows, hidden_gradient
from cce.kernels.launch import Launches
from cce.kernels.logits import addressable, padded_width
from cce.kernels.product import kahan_block, kahan_product, product_into
from cce.kernels.target_logit import target_logit
from cce.plans import one_pass_splits
from cce.presets import Accumulation
from cce.tiles import architecture, logits_tile


def one_pass(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    dloss: torch.Tensor,
    softcap: float | None,
    z_loss: float,
    chunk: int,
    accumulation: Accumulation,
    needs: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(nll [N], lse [N], dE [N, D], dC [V, D]); dE and dC are gradients of dloss * sum(nll + z_loss lse^2), in `dtypes`.

    e, c: bf16. dloss: fp32 scalar on the device. chunk: tokens at a time. accumulation: of dC over chunks. needs: which of
    dE, dC.
    """
    (N, D), V, device = e_ND.shape, c_VD.shape[0], e_ND.device
    need_e, need_c = needs
    e_ND, c_VD = addressable(e_ND), addressable(c_VD)
    padded, chunk = e_ND.shape[1], min(chunk, N)
    arch = architecture(e_ND.device, e_ND.dtype)
    tile = logits_tile(e_ND.dtype, padded, arch, stored=True)
    splits = one_pass_splits(chunk, V, padded, arch)
    f32 = dict(dtype=torch.float32, device=device)

    parts, tile_references = torch.empty(splits, chunk, **f32), torch.empty(triton.cdiv(V, tile.columns), chunk, **f32)
    tokens = torch.empty(4, N, **f32)
    de_ND = torch.empty(N, padded, dtype=dtypes[0], device=device) if need_e else None
    de_chunk = torch.empty(chunk, padded, **f32) if need_e else None
    scaled_e = torch.empty(chunk, padded, dtype=e_ND.dtype, device=device) if need_c else None
    dc_VD = torch.empty(V, padded, dtype=dtypes[1], device=device) if need_c else None
    fp32_sum = need_c and accumulation == "fp32" and dtypes[1] != torch.float32
    sum_VD = torch.empty(V, padded, **f32) if fp32_sum else dc_VD
    comp_VD = block = None
    if need_c and accumulation == "kahan" and dtypes[1] != torch.float32:
        comp_VD = torch.empty_like(dc_VD)
        block = torch.empty(min(V, kahan_block(padded)), padded, **f32)
    # While dC's sum is kept elsewhere, its own memory holds the exponentials, where they fit.
    width = padded_width(V, e_ND.element_size())
    if fp32_sum and dc_VD.numel() >= chunk * width:
        w = dc_VD.view(-1)[: chunk * width].view(e_ND.dtype)
    else:
        w = torch.empty(chunk * width, dtype=e_ND.dtype, device=device)
    w = w.view(chunk, width)[:, :V]
    reference_N = target_logit(e_ND, c_VD, bias_V, codes_N, softcap)
    target_N = reference_N.clone()
    launch, x_nD = Launches(), None

    for n0 in range(0, N, chunk):
        n = min(chunk, N - n0)
        here = slice(n0, n0 + n)
        of_chunk = tokens[:, here].unbind()
        e_nD, codes_n, w_nV = e_ND[here], codes_N[here], w[:n]
        s_nD = scaled_e[:n] if need_c else None
        exponentials(
            e_nD, c_VD, bias_V, codes_n, reference_N[here], target_N[here], dloss, softcap, z_loss, w_nV, s_nD, parts,
            tile_references, of_chunk, launch,
        )  # fmt: skip
        if need_e:
            x_nD = de_chunk[:n]
            product_into(w_nV, c_VD, x_nD, add=False)
            hidden_gradient(x_nD, *of_chunk[2:], c_VD, codes_n, de_ND[here], launch)
        if need_c:
            if block is not None:
                kahan_product(w_nV, s_nD, dc_VD, comp_VD, block, transposed=True, add=n0 > 0)
            else:
                product_into(w_nV, s_nD, sum_VD, transposed=True, add=n0 > 0)
    nll_N, lse_N, _, own_N = tokens
    del w, w_nV, de_chunk, x_nD, scaled_e, s_nD, parts, tile_references, block  # what follows takes memory of its own
    if need_c:
        add_target_rows(e_ND, own_N, codes_N, sum_VD, comp_VD)
        if fp32_sum:
            dc_VD.copy_(sum_VD)
    if padded != D:
        de_ND, dc_VD = (None if matrix is None else matrix[:, :D].contiguous() for matrix in (de_ND, dc_VD))
    return nll_N, lse_N, de_ND, dc_VD
