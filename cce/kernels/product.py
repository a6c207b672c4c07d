"""Out (+)= A B with fp32 accumulators and a choice of how the sum over calls is rounded; walks only surviving tiles.

cuBLAS does the products that end in one call; this kernel does those that cuBLAS has no epilogue for.
"""

import torch
import triton
import triton.language as tl

from cce.kernels.epilogues import halves
from cce.kernels.filter import Survivors
from cce.kernels.logits import descriptor, dot, grouped, precision
from cce.tiles import BLOCK_BYTES, MULTIPROCESSORS, architecture, filter_tile, interpreting, product_tile


# How a sum over calls is rounded. Out and Comp are in the gradient's dtype, or Out alone in fp32:
#   plain   Out = round(Out + AB)
#   Kahan   Comp carries the rounding error of Out: y = AB - Comp; t = round(Out + y); Comp = round((t - Out) - y);
#           Out = t, worked in fp32. bf16 + bf16 then behave like 16 bits of mantissa at half of fp32's buffer.
@triton.jit
def _rounded_sum(old, y, dtype: tl.constexpr):
    """(t, its rounding error)."""
    new = (old + y).to(dtype)
    return new, ((new.to(tl.float32) - old) - y).to(dtype)


@triton.jit
def _add_tile(acc, Out, Comp, m0, c0, ADD: tl.constexpr, KAHAN: tl.constexpr):
    old = tl.zeros(acc.shape, tl.float32)
    if ADD:
        old = Out.load([m0, c0]).to(tl.float32)
        if KAHAN:
            acc -= Comp.load([m0, c0]).to(tl.float32)
    new, error = _rounded_sum(old, acc, Out.dtype)
    if KAHAN:
        Comp.store([m0, c0], error)
    Out.store([m0, c0], new)


@triton.jit
def _prefetch(Base, m0, c0, M, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr):
    """Ask L2 for a tile of Base [M, stride], a cache line of LINE elements at a time."""
    offs_m = m0 + tl.arange(0, ROWS)
    lines = c0 + tl.arange(0, COLUMNS // LINE) * LINE
    at = Base + tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * stride + tl.minimum(lines, stride - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


# One program owns one tile of Out at a time, so nothing is added atomically: it runs over all of K and then adds once.
# The tile is added in QUARTERS of its columns to keep registers free, and asked into L2 before the product begins, so that
# the addition does not wait for memory.
# FILTERED: Count and Order say which tiles of K survive for this row of tiles; only those are read.
@triton.jit
def _product_kernel(
    A, B, Out, Comp, OutBase, CompBase, Count, Order, Factor, M, K, stride_order, stride_out,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, TRANSPOSED: tl.constexpr, ADD: tl.constexpr, KAHAN: tl.constexpr, FILTERED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, HAS_FACTOR: tl.constexpr, QUARTERS: tl.constexpr,
    PREFETCH: tl.constexpr, LINE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.cdiv(M, BLOCK_M)
    columns: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    for pid in tl.range(tl.program_id(0), rows * columns, PROGRAMS):
        tile_m, tile_c = grouped(pid, rows, columns, GROUP)
        m0 = tile_m * BLOCK_M
        c0 = tile_c * BLOCK_C
        steps = tl.cdiv(K, BLOCK_K)
        if FILTERED:
            steps = tl.load(Count + m0 // TILE_M) * (TILE_K // BLOCK_K)
        if PREFETCH:
            _prefetch(OutBase, m0, c0, M, stride_out, BLOCK_M, BLOCK_C, LINE)
            if KAHAN:
                _prefetch(CompBase, m0, c0, M, stride_out, BLOCK_M, BLOCK_C, LINE)
        acc = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
        for step in tl.range(0, steps):
            k = step * BLOCK_K
            if FILTERED:
                tile_k = tl.load(Order + (m0 // TILE_M) * stride_order + step // (TILE_K // BLOCK_K))
                k = tile_k * TILE_K + (step % (TILE_K // BLOCK_K)) * BLOCK_K
            if TRANSPOSED:
                a = A.load([k, m0]).T
            else:
                a = A.load([m0, k])
            acc = dot(a, B.load([k, c0]), acc, PRECISION)
        if (steps > 0) | (not ADD):
            if HAS_FACTOR:
                acc *= tl.load(Factor)
            if QUARTERS:
                left, right = halves(acc, BLOCK_M, BLOCK_C)
                first, second = halves(left, BLOCK_M, BLOCK_C // 2)
                _add_tile(first, Out, Comp, m0, c0, ADD, KAHAN)
                _add_tile(second, Out, Comp, m0, c0 + BLOCK_C // 4, ADD, KAHAN)
                third, fourth = halves(right, BLOCK_M, BLOCK_C // 2)
                _add_tile(third, Out, Comp, m0, c0 + BLOCK_C // 2, ADD, KAHAN)
                _add_tile(fourth, Out, Comp, m0, c0 + 3 * (BLOCK_C // 4), ADD, KAHAN)
            else:
                _add_tile(acc, Out, Comp, m0, c0, ADD, KAHAN)


def add_product(
    a: torch.Tensor,
    b_KC: torch.Tensor,
    out_MC: torch.Tensor,
    *,
    transposed: bool = False,
    add: bool,
    comp_MC: torch.Tensor | None = None,
    kept: Survivors | None = None,
    factor: torch.Tensor | None = None,
) -> None:
    """out = A B, or out += A B with `add`, in place. a is A [M, K], or A^T [K, M] with `transposed`.

    comp_MC: rounding error of out, carried from call to call (Kahan). kept: per row of M's filter tiles the surviving tiles of
    K. factor: fp32 scalar on the device that multiplies A B. All matrices `addressable`, out and comp of the same strides.
    """
    (K, M) = a.shape if transposed else a.shape[::-1]
    columns, arch = b_KC.shape[1], architecture(a.device, a.dtype)
    tile = product_tile(a.dtype, columns, arch)
    quarters = tile.columns == 256
    stored = tile.columns // 4 if quarters else tile.columns
    tile_m, tile_k = filter_tile(arch)[:: -1 if transposed else 1]
    tiles = triton.cdiv(M, tile.rows) * triton.cdiv(columns, tile.columns)
    _product_kernel[(min(tiles, MULTIPROCESSORS),)](
        descriptor(a, tile.depth, tile.rows) if transposed else descriptor(a, tile.rows, tile.depth),
        descriptor(b_KC, tile.depth, tile.columns), descriptor(out_MC, tile.rows, stored),
        None if comp_MC is None else descriptor(comp_MC, tile.rows, stored), out_MC, comp_MC,
        None if kept is None else kept.count, None if kept is None else kept.order, factor, M, K,
        0 if kept is None else kept.order.stride(0), out_MC.stride(0),
        COLUMNS=columns, BLOCK_M=tile.rows, BLOCK_C=tile.columns, BLOCK_K=tile.depth, GROUP=tile.group,
        PROGRAMS=MULTIPROCESSORS, TRANSPOSED=transposed, ADD=add, KAHAN=comp_MC is not None, FILTERED=kept is not None,
        TILE_M=tile_m, TILE_K=tile_k, HAS_FACTOR=factor is not None, QUARTERS=quarters, PREFETCH=add and not interpreting(),
        LINE=128 // out_MC.element_size(), PRECISION=precision(a.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _kahan_kernel(X, Out, Comp, count, ADD: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    y = tl.load(X + offs, mask=inside, other=0.0)
    old = tl.zeros((BLOCK,), dtype=tl.float32)
    if ADD:
        old = tl.load(Out + offs, mask=inside, other=0.0).to(tl.float32)
        y -= tl.load(Comp + offs, mask=inside, other=0.0).to(tl.float32)
    new, error = _rounded_sum(old, y, Out.dtype.element_ty)
    tl.store(Comp + offs, error, mask=inside)
    tl.store(Out + offs, new, mask=inside)


def _matmul_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> bool:
    """out = a b or out += a b by the vendor's library with fp32 accumulators; False if it has no such product."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        return True
    widens = out.dtype == torch.float32 and out.device.type == "cuda" and torch.version.cuda is not None
    if widens and hasattr(torch.ops.aten.addmm, "dtype_out"):
        if add:
            torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
        return True
    return False


def product_into(
    a: torch.Tensor, b_KC: torch.Tensor, out_MC: torch.Tensor, *, transposed: bool = False, add: bool
) -> None:
    """As add_product: the vendor's library where it has such a product, else the kernel here."""
    if not _matmul_into(a.t() if transposed else a, b_KC, out_MC, add):
        add_product(a, b_KC, out_MC, transposed=transposed, add=add)


def block_rows(columns: int) -> int:
    """Rows of the fp32 block that products go through where they are finished piece by piece."""
    return 16 if interpreting() else max(128, BLOCK_BYTES // (4 * columns) // 128 * 128)


def kahan_product(
    a: torch.Tensor,
    b_KC: torch.Tensor,
    out_MC: torch.Tensor,
    comp_MC: torch.Tensor,
    block: torch.Tensor,
    *,
    transposed: bool = False,
    add: bool,
) -> None:
    """As add_product with comp_MC, by the vendor's products: rows of A B go through `block` [rows, C] fp32, which stays in L2."""
    M = out_MC.shape[0]
    for m0 in range(0, M, block.shape[0]):
        rows = slice(m0, min(m0 + block.shape[0], M))
        out, comp = out_MC[rows], comp_MC[rows]
        x = block[: out.shape[0]]
        of_rows = a[:, rows] if transposed else a[rows]
        product_into(of_rows, b_KC, x, transposed=transposed, add=False)
        count, step = x.numel(), 128 if interpreting() else 2048
        _kahan_kernel[(triton.cdiv(count, step),)](x, out, comp, count, ADD=add, BLOCK=step)
