"""The kept exponentials of cce/kernels/exponentials.py and their product with C, w C, in one kernel, for small hidden sizes.

A tile of c serves both products while it is in shared memory: z = e c^T, and, once the epilogue has made w of z in registers,
x += w c, with the rounded w that is stored for dC. A group of warps has its 64 tokens' x [64, D] in fp32 registers for all
tiles of an item; what the groups' epilogues take runs beside the products of the other. Where a token's reference moves, its x
is brought to it.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cce.kernels.epilogues import kept_exponentials, starting_reference, store_reference
from cce.kernels.hopper.host import LAUNCH, descriptor, programs, result
from cce.kernels.hopper.pipeline import ROWS, STORED, TOKENS, after, item_at, logits_layout, rows_of
from cce.kernels.launch import Launch
from cce.tiles import HOPPER_MULTIPLYING_TILE

CLASSES = gl.constexpr(HOPPER_MULTIPLYING_TILE.columns)
STAGES = gl.constexpr(4)  # tiles of c


@gluon.jit
def _load(E, C, e_tiles, c_tiles, full, empty, e_full, e_empty, Codes, N, V, first_n, splits):
    """All of an item's rows of e, and tile after tile of c, in the order in which they are consumed."""
    stage, phase, e_phase = 0, 1, 1
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, _, first, last, _ = item_at(item, Codes, N, V, splits, CLASSES)
        n0 += first_n
        mbarrier.wait(e_empty, e_phase)
        mbarrier.expect(e_full, 2 * E.block_type.nbytes)
        tma.async_copy_global_to_shared(E, [n0, 0], e_full, e_tiles.index(0))
        tma.async_copy_global_to_shared(E, [n0 + ROWS, 0], e_full, e_tiles.index(1))
        e_phase ^= 1
        for tile_v in range(first, last):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), C.block_type.nbytes)
            tma.async_copy_global_to_shared(C, [tile_v * CLASSES, 0], full.index(stage), c_tiles.index(stage))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _consume(
    e_tiles, c_tiles, out_tiles, full, empty, e_full, e_empty, W, X, LastX, Bias, Codes, Reference, Target, Part,
    TileReference, N, V, softcap, splits, half: gl.constexpr, D: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    KD: gl.constexpr = c_tiles.type.shape[2]
    of_logits: gl.constexpr = logits_layout(CLASSES)
    of_x: gl.constexpr = logits_layout(KD)
    of_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_x, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_logits)
    e_tile = e_tiles.index(half)
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, split, first, last, _ = item_at(item, Codes, N, V, splits, CLASSES)
        offs_n, in_n, code = rows_of(n0, Codes, N, half, CLASSES)
        reference = starting_reference(Reference, offs_n, in_n)
        exp_sum = gl.full([ROWS], 0.0, gl.float32, of_rows)
        x = gl.zeros([ROWS, KD], gl.float32, of_x)
        mbarrier.wait(e_full, e_phase)
        e_phase ^= 1
        operand = gl.zeros([ROWS, CLASSES], W.dtype, of_operand)
        for tile_v in range(first, last):
            v0 = tile_v * CLASSES
            offs_v = v0 + gl.arange(0, CLASSES, layout=gl.SliceLayout(0, of_logits))
            mbarrier.wait(full.index(stage), phase)
            z = gl.zeros([ROWS, CLASSES], gl.float32, of_logits)
            z = warpgroup_mma(e_tile, c_tiles.index(stage).permute((1, 0)), z, use_acc=False, is_async=True)
            # The product of the tile before. Of an item's first there is none: what is multiplied then is written over.
            c_tile = c_tiles.index((stage + STAGES - (tile_v > first).to(gl.int32)) % STAGES)
            x = warpgroup_mma(operand, c_tile, x, use_acc=tile_v > first + 1, is_async=True)
            z = warpgroup_mma_wait(1, deps=(z,))
            before = reference
            w, reference, exp_sum, seldom = kept_exponentials(
                z, reference, exp_sum, Bias, Target, TileReference, code, offs_n, in_n, offs_v, tile_v, v0, N, V,
                softcap, CLASSES, HAS_BIAS, HAS_SOFTCAP,
            )  # fmt: skip
            w = w.to(W.dtype)
            w_tile = out_tiles.index(2 * half + tile_v % 2)
            tma.store_wait(1)
            w_tile.store(w)
            fence_async_shared()
            tma.async_copy_shared_to_global(W, [n0 + half * ROWS, v0], w_tile)
            store_reference(TileReference, reference, tile_v, offs_n, in_n, N)
            x = warpgroup_mma_wait(0, deps=(x,))
            mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=tile_v > first)
            if seldom:
                factor = gl.convert_layout(gl.exp2(before - reference), gl.SliceLayout(1, of_x))
                x = x * factor[:, None]
            operand = gl.convert_layout(w, of_operand)
            stage, phase = after(stage, phase, STAGES)
        c_tile = c_tiles.index((stage + STAGES - 1) % STAGES)
        x = warpgroup_mma(operand, c_tile, x, use_acc=last > first + 1, is_async=True)
        x = warpgroup_mma_wait(0, deps=(x,))
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES))
        mbarrier.arrive(e_empty)
        gl.store(Part + split.to(gl.int64) * N + offs_n, reference + gl.log2(exp_sum), mask=in_n)
        rows = n0 + half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_x))
        columns = gl.arange(0, KD, layout=gl.SliceLayout(0, of_x))
        Out = X + split.to(gl.int64) * N * D
        if split == splits - 1:
            Out = LastX
        gl.store(Out + rows[:, None] * D + columns[None, :], x, mask=(rows < N)[:, None] & (columns < D)[None, :])
    tma.store_wait(0)


# cce/kernels/exponentials.py says what it computes beside X [splits - 1, N, D] and LastX [N, D], fp32: w C of a split, in units of
# 2^-reference of its last tile.
@gluon.jit
def _exponentials_product_kernel(
    E, C, W, X, LastX, Bias, Codes, Reference, Target, Part, TileReference, N, V, softcap, splits, first_n,
    D: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    Codes += first_n
    Reference += first_n
    Target += first_n
    e_tiles = gl.allocate_shared_memory(E.dtype, [2] + E.block_type.shape, E.layout)
    c_tiles = gl.allocate_shared_memory(C.dtype, [STAGES] + C.block_type.shape, C.layout)
    out_tiles = gl.allocate_shared_memory(W.dtype, [4, ROWS, STORED], W.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    e_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    e_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(e_full, count=1)
    mbarrier.init(e_empty, count=2)
    gl.warp_specialize(
        [
            (_consume, (e_tiles, c_tiles, out_tiles, full, empty, e_full, e_empty, W, X, LastX, Bias, Codes, Reference,
                        Target, Part, TileReference, N, V, softcap, splits, 0, D, HAS_BIAS, HAS_SOFTCAP)),
            (_consume, (e_tiles, c_tiles, out_tiles, full, empty, e_full, e_empty, W, X, LastX, Bias, Codes, Reference,
                        Target, Part, TileReference, N, V, softcap, splits, 1, D, HAS_BIAS, HAS_SOFTCAP)),
            (_load, (E, C, e_tiles, c_tiles, full, empty, e_full, e_empty, Codes, N, V, first_n, splits)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def exponentials_product(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    w_nV: torch.Tensor,
    x_snD: torch.Tensor,
    last_x_nD: torch.Tensor,
    arguments: tuple,
    flags: dict,
) -> Launch:
    """As hopper.exponentials, with w C by splits of the vocabulary: of all but the last split in x, contiguous."""
    D = e_ND.shape[1]
    hidden = max(64, triton.next_power_of_2(D))
    return Launch(
        _exponentials_product_kernel,
        programs(w_nV.shape[0], e_ND.device, arguments[-1]),
        (
            descriptor(e_ND, ROWS.value, hidden), descriptor(c_VD, CLASSES.value, hidden), result(w_nV), x_snD, last_x_nD,
            *arguments,
        ),
        {"D": D, **flags},
        **LAUNCH,
    )  # fmt: skip
