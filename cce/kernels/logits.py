"""What the kernels share: a tile of logits from fp32 accumulators, the order of programs, descriptors, stores.

Shapes: N tokens, D hidden, V vocabulary. Matrices are read and written through tensor descriptors (Hopper's tensor memory
accelerator; plain loads on older GPUs): tiles that reach past an edge read zeros there and write nothing.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cce.kernels.epilogues import halves
from cce.tiles import DESCRIPTOR_BYTES, interpreting, padded_width


def precision(dtype: torch.dtype) -> str:
    """How `dot` takes its operands: fp32 ones as PyTorch's own matrix products do; bf16 and fp16 ones as they are.

    "widen" makes bf16 operands fp32 first, the same numbers, for the interpreter, whose tl.dot reads bf16 as integers.
    """
    if dtype == torch.float32:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "widen" if interpreting() and dtype == torch.bfloat16 else "ieee"


def addressable(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix [rows, columns] as descriptors need it: itself where rows are contiguous and lie at multiples of 16 bytes,
    else a copy, with zero columns up to padded_width."""
    rows, columns = matrix.shape
    width = padded_width(columns, matrix.element_size())
    aligned = matrix.stride(0) * matrix.element_size() % DESCRIPTOR_BYTES == 0 and matrix.stride(0) >= columns
    if width == columns and matrix.stride(1) == 1 and aligned and matrix.data_ptr() % DESCRIPTOR_BYTES == 0:
        return matrix
    copy = torch.zeros(rows, width, dtype=matrix.dtype, device=matrix.device)
    copy[:, :columns] = matrix
    return copy


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of an `addressable` matrix by blocks of rows x columns."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit
def grouped(pid, rows, columns, GROUP: tl.constexpr):
    """(row, column) of a tile: down GROUP rows, then the next column, so that both operands stay in L2."""
    group = pid // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    within = pid % (GROUP * columns)
    return group * GROUP + within % height, within // height


@triton.jit
def part_of(split, tiles, splits):
    """(first tile, one past the last) of a split: those that have a tile more than others come first."""
    shorter = tiles // splits
    longer = tiles % splits
    return split * shorter + tl.minimum(split, longer), (split + 1) * shorter + tl.minimum(split + 1, longer)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b with fp32 accumulators."""
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def raw_logits(
    E, C, n0, v0, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """e_n . c_v of the tile at (n0, v0), in fp32; 0 for rows past N and classes past V.

    The sums of every other tile of classes go backward: cce/tiles.py: sum_gain.
    """
    z = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    backward = (v0 // BLOCK_V) % 2
    for d in tl.range(0, D, BLOCK_D):
        at = d + backward * ((D - 1) // BLOCK_D * BLOCK_D - 2 * d)
        z = dot(E.load([n0, at]), C.load([v0, at]).T, z, PRECISION)
    return z


def stored_columns(columns: int) -> int:
    """Columns of the block that store_tile writes at a time: a whole tile would take shared memory from the product, or a
    second program from the multiprocessor."""
    return columns // 4 if columns >= 128 else columns


@triton.jit
def store_tile(Out, x, r0, c0, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Round a tile to Out's dtype and write it at (r0, c0), by blocks of stored_columns."""
    if COLUMNS >= 128:
        left, right = halves(x, ROWS, COLUMNS)
        first, second = halves(left, ROWS, COLUMNS // 2)
        Out.store([r0, c0], first.to(Out.dtype))
        Out.store([r0, c0 + COLUMNS // 4], second.to(Out.dtype))
        third, fourth = halves(right, ROWS, COLUMNS // 2)
        Out.store([r0, c0 + COLUMNS // 2], third.to(Out.dtype))
        Out.store([r0, c0 + 3 * (COLUMNS // 4)], fourth.to(Out.dtype))
    else:
        Out.store([r0, c0], x.to(Out.dtype))
