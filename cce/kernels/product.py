"""Out (+)= A B with fp32 accumulators and a choice of how the sum over calls is rounded; skips dropped tiles.

cuBLAS does the products that end in one call; this kernel does those that cuBLAS has no epilogue for.
"""

import torch
import triton
import triton.language as tl

from cce.kernels.logits import dot, grouped, interpreting, precision
from cce.tiles import Tile, filter_tile, product_tile


@triton.jit
def _step(a_ptrs, b_ptrs, in_m, in_c, in_k, acc, PRECISION: tl.constexpr):
    # Masks, not clamped indices: the compiler then still sees contiguous rows and copies 16 bytes at a time.
    a = tl.load(a_ptrs, mask=in_m[:, None] & in_k[None, :], other=0.0)
    b = tl.load(b_ptrs, mask=in_k[:, None] & in_c[None, :], other=0.0)
    return dot(a, b, acc, PRECISION)


# One program owns one tile of Out, so nothing is added atomically: it runs over all of K and then adds once.
# Out and Comp are M x columns in the gradient's dtype, or Out alone in fp32:
#   plain   Out = round(Out + AB)
#   Kahan   Comp carries the rounding error of Out: y = AB - Comp; t = round(Out + y); Comp = round((t - Out) - y);
#           Out = t, worked in fp32. bf16 + bf16 then behave like 16 bits of mantissa at half of fp32's buffer.
# FILTERED: Kept holds one byte per filter tile of A; a step of K lies in one of them and is skipped if the byte is 0.
@triton.jit
def _product_kernel(
    A, B, Out, Comp, Kept, Factor, M, K, stride_am, stride_ak, stride_b, stride_o, kept_m, kept_k,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, KAHAN: tl.constexpr, FILTERED: tl.constexpr, KEPT_ROWS: tl.constexpr, KEPT_DEPTH: tl.constexpr,
    HAS_FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_c = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(COLUMNS, BLOCK_C), GROUP)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = offs_m < M
    in_c = offs_c < COLUMNS
    a_ptrs = A + offs_m.to(tl.int64)[:, None] * stride_am + offs_k.to(tl.int64)[None, :] * stride_ak
    b_ptrs = B + offs_k.to(tl.int64)[:, None] * stride_b + offs_c[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    if FILTERED:
        kept_ptr = Kept + (tile_m * BLOCK_M // KEPT_ROWS) * kept_m
        for k in range(0, K, BLOCK_K):
            if tl.load(kept_ptr + (k // KEPT_DEPTH) * kept_k) != 0:
                acc = _step(a_ptrs, b_ptrs, in_m, in_c, offs_k < K - k, acc, PRECISION)
            a_ptrs += BLOCK_K * stride_ak
            b_ptrs += BLOCK_K * stride_b
    else:
        for k in range(0, K, BLOCK_K):
            acc = _step(a_ptrs, b_ptrs, in_m, in_c, offs_k < K - k, acc, PRECISION)
            a_ptrs += BLOCK_K * stride_ak
            b_ptrs += BLOCK_K * stride_b
    if HAS_FACTOR:
        acc *= tl.load(Factor)
    mask = in_m[:, None] & in_c[None, :]
    first = tl.cast(tile_m, tl.int64) * BLOCK_M * stride_o + tile_c * BLOCK_C
    at = tl.arange(0, BLOCK_M)[:, None] * stride_o + tl.arange(0, BLOCK_C)[None, :]
    old = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    if ADD:
        old = tl.load(Out + first + at, mask=mask, other=0.0).to(tl.float32)
        if KAHAN:
            acc -= tl.load(Comp + first + at, mask=mask, other=0.0).to(tl.float32)
    new = (old + acc).to(Out.dtype.element_ty)
    if KAHAN:
        tl.store(Comp + first + at, ((new.to(tl.float32) - old) - acc).to(Comp.dtype.element_ty), mask=mask)
    tl.store(Out + first + at, new, mask=mask)


def add_product(
    a_MK: torch.Tensor,
    b_KC: torch.Tensor,
    out_MC: torch.Tensor,
    *,
    add: bool,
    comp_MC: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    kept_tile: tuple[int, int] | None = None,
    factor: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """out = A B, or out += A B with `add`, in place.

    comp_MC: rounding error of out, carried from call to call (Kahan). kept [M tiles, K tiles] uint8 and kept_tile, the
    filter's tile as (rows of A, depth of A): steps in tiles with 0 are skipped. factor: fp32 scalar on the device that
    multiplies A B. Any strides of A; rows of B and out contiguous.
    """
    (M, K), columns = a_MK.shape, b_KC.shape[1]
    kept_strides = (0, 0) if kept is None else kept.stride()
    tile = tile or product_tile(a_MK.dtype, columns, interpreting())
    kept_tile = kept_tile or filter_tile(interpreting())
    _product_kernel[(triton.cdiv(M, tile.rows) * triton.cdiv(columns, tile.columns),)](
        a_MK, b_KC, out_MC, comp_MC, kept, factor, M, K,
        a_MK.stride(0), a_MK.stride(1), b_KC.stride(0), out_MC.stride(0), *kept_strides,
        COLUMNS=columns, BLOCK_M=tile.rows, BLOCK_C=tile.columns, BLOCK_K=tile.depth, GROUP=tile.group,
        ADD=add, KAHAN=comp_MC is not None, FILTERED=kept is not None, KEPT_ROWS=kept_tile[0], KEPT_DEPTH=kept_tile[1],
        HAS_FACTOR=factor is not None, PRECISION=precision(a_MK.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
