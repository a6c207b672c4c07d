"""Products of tiles that stay with tiles that stream by: rows [128, D] are kept in shared memory while columns [64, D] come.

Where D is small a tile of columns serves two products while it is there: logits z = rows columns^T, and, once an epilogue has made
w of z in registers, x += w columns. A group of warps has 64 rows, and their x [64, D] in fp32 registers for all tiles of an item.
The products z of a tile and x of the one before run together, x also beside the epilogue.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from cce.kernels.hopper.host import descriptor
from cce.kernels.hopper.pipeline import ROWS, TOKENS, after, barriers, item_barriers, logits_layout, part_at
from cce.tiles import HOPPER_STREAMING_TILE

COLUMNS = gl.constexpr(HOPPER_STREAMING_TILE.columns)
STAGES = gl.constexpr(4)  # tiles of columns


@gluon.constexpr_function
def operand_layout(hidden):
    """Of w as an operand of x."""
    return gl.DotOperandLayout(operand_index=0, parent=logits_layout(hidden), k_width=2)


@gluon.jit
def shared_memory(Rows, Columns):
    """Buffers and barriers: (rows, columns, full, empty, rows' full, rows' empty)."""
    rows = gl.allocate_shared_memory(Rows.dtype, [2] + Rows.block_type.shape, Rows.layout)
    columns = gl.allocate_shared_memory(Columns.dtype, [STAGES] + Columns.block_type.shape, Columns.layout)
    full, empty = barriers(STAGES)
    rows_full, rows_empty = item_barriers()
    return rows, columns, full, empty, rows_full, rows_empty


@gluon.jit
def stream(Rows, Columns, shared, rows_count, columns_count, first_row, splits):
    """All of an item's rows, and tile after tile of columns, in the order in which they are consumed."""
    rows, columns, full, empty, rows_full, rows_empty = shared
    stage, phase, rows_phase = 0, 1, 1
    for item in range(gl.program_id(0), gl.cdiv(rows_count, TOKENS) * splits, gl.num_programs(0)):
        row, _, first, last = part_at(item, rows_count, columns_count, splits, COLUMNS)
        row += first_row
        mbarrier.wait(rows_empty, rows_phase)
        mbarrier.expect(rows_full, 2 * Rows.block_type.nbytes)
        tma.async_copy_global_to_shared(Rows, [row, 0], rows_full, rows.index(0))
        tma.async_copy_global_to_shared(Rows, [row + ROWS, 0], rows_full, rows.index(1))
        rows_phase ^= 1
        for tile in range(first, last):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), Columns.block_type.nbytes)
            tma.async_copy_global_to_shared(Columns, [tile * COLUMNS, 0], full.index(stage), columns.index(stage))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def begin_tile(shared, half: gl.constexpr, stage, phase, w, x, tile, first):
    """(z of a tile [ROWS, COLUMNS], x with the product of the tile before, under way). w: of the tile before, as an operand."""
    rows, columns, full, empty, rows_full, rows_empty = shared
    mbarrier.wait(full.index(stage), phase)
    z = gl.zeros([ROWS, COLUMNS], gl.float32, logits_layout(COLUMNS))
    z = warpgroup_mma(rows.index(half), columns.index(stage).permute((1, 0)), z, use_acc=False, is_async=True)
    # Before an item's first tile there is none: what is multiplied then is written over.
    before = columns.index((stage + STAGES - (tile > first).to(gl.int32)) % STAGES)
    x = warpgroup_mma(w, before, x, use_acc=tile > first + 1, is_async=True)
    z = warpgroup_mma_wait(1, deps=(z,))
    return z, x


@gluon.jit
def end_tile(shared, stage, x, tile, first):
    """x with the product of the tile before."""
    empty = shared[3]
    x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=tile > first)
    return x


@gluon.jit
def end_item(shared, stage, w, x, first, last):
    """x with the product of an item's last tile, behind which `stage` is."""
    rows, columns, full, empty, rows_full, rows_empty = shared
    of_last = (stage + STAGES - 1) % STAGES
    x = warpgroup_mma(w, columns.index(of_last), x, use_acc=last > first + 1, is_async=True)
    x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(empty.index(of_last))
    mbarrier.arrive(rows_empty)
    return x


@gluon.jit
def store_sums(Out, x, row, rows_count, stride, D: gl.constexpr):
    """x [ROWS, >= D] into Out, rounded to its dtype: rows `row` on, below rows_count."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))
    hidden = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    at = Out + rows.to(gl.int64)[:, None] * stride + hidden[None, :]
    gl.store(at, x.to(Out.dtype.element_ty), mask=(rows < rows_count)[:, None] & (hidden < D)[None, :])


def operands(rows: torch.Tensor, columns: torch.Tensor) -> tuple:
    """Descriptors of what stays and what streams by, `addressable`, bf16 or fp16."""
    hidden = max(64, triton.next_power_of_2(rows.shape[1]))
    return descriptor(rows, ROWS.value, hidden), descriptor(columns, COLUMNS.value, hidden)
