"""The kept exponentials of cce/kernels/exponentials.py and their product with C, w C, in one kernel, for small hidden sizes.

Tokens stay, tiles of c stream by (streaming.py). Where a token's reference moves, its x is brought to it.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from cce.kernels.epilogues import kept_exponentials, starting_reference, store_reference
from cce.kernels.hopper.host import LAUNCH, programs, result
from cce.kernels.hopper.pipeline import ROWS, STORED, TOKENS, after, logits_layout, part_at, rows_of
from cce.kernels.hopper.streaming import (
    COLUMNS,
    STAGES,
    begin_tile,
    end_item,
    end_tile,
    operand_layout,
    operands,
    shared_memory,
    stream,
)
from cce.kernels.launch import Launch


@gluon.jit
def _product_consumer(
    shared, out_tiles, W, X, LastX, Bias, Codes, Reference, Target, Part, TileReference, N, V, softcap, splits,
    half: gl.constexpr, D: gl.constexpr, NEED_W: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    KD: gl.constexpr = shared[1].type.shape[2]
    dtype: gl.constexpr = shared[1].dtype
    of_x: gl.constexpr = logits_layout(KD)
    of_rows: gl.constexpr = gl.SliceLayout(1, logits_layout(COLUMNS))
    of_columns: gl.constexpr = gl.SliceLayout(0, logits_layout(COLUMNS))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, split, first, last = part_at(item, N, V, splits, COLUMNS)
        offs_n, in_n, code = rows_of(n0, Codes, N, half, COLUMNS)
        reference = starting_reference(Reference, offs_n, in_n)
        exp_sum = gl.full([ROWS], 0.0, gl.float32, of_rows)
        x = gl.zeros([ROWS, KD], gl.float32, of_x)
        operand = gl.zeros([ROWS, COLUMNS], dtype, operand_layout(KD))
        mbarrier.wait(shared[4], e_phase)
        e_phase ^= 1
        for tile_v in range(first, last):
            v0 = tile_v * COLUMNS
            offs_v = v0 + gl.arange(0, COLUMNS, layout=of_columns)
            z, x = begin_tile(shared, half, stage, phase, operand, x, tile_v, first)
            before = reference
            kept = tile_v if NEED_W else split
            w, reference, exp_sum, seldom = kept_exponentials(
                z, reference, exp_sum, Bias, Target, TileReference, code, offs_n, in_n, offs_v, kept, v0, N, V,
                softcap, COLUMNS, HAS_BIAS, HAS_SOFTCAP,
            )  # fmt: skip
            w = w.to(dtype)
            if NEED_W:
                w_tile = out_tiles.index(2 * half + tile_v % 2)
                tma.store_wait(1)
                w_tile.store(w)
                fence_async_shared()
                tma.async_copy_shared_to_global(W, [n0 + half * ROWS, v0], w_tile)
                store_reference(TileReference, reference, tile_v, offs_n, in_n, N)
            x = end_tile(shared, stage, x, tile_v, first)
            if seldom:
                factor = gl.convert_layout(gl.exp2(before - reference), gl.SliceLayout(1, of_x))
                x = x * factor[:, None]
            operand = gl.convert_layout(w, operand_layout(KD))
            stage, phase = after(stage, phase, STAGES)
        x = end_item(shared, stage, operand, x, first, last)
        gl.store(Part + split.to(gl.int64) * N + offs_n, reference + gl.log2(exp_sum), mask=in_n)
        if not NEED_W:
            store_reference(TileReference, reference, split, offs_n, in_n, N)
        rows = n0 + half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_x))
        columns = gl.arange(0, KD, layout=gl.SliceLayout(0, of_x))
        Out = X + split.to(gl.int64) * N * D
        if split == splits - 1:
            Out = LastX
        gl.store(Out + rows[:, None] * D + columns[None, :], x, mask=(rows < N)[:, None] & (columns < D)[None, :])
    if NEED_W:
        tma.store_wait(0)


# cce/kernels/exponentials.py says what it computes beside X [splits - 1, N, D] and LastX [N, D], fp32: w C of a split, in units of
# 2^-reference of its last tile. Without W, TileReference has a row for each split, of its last tile.
@gluon.jit
def _exponentials_product_kernel(
    E, C, W, X, LastX, Bias, Codes, Reference, Target, Part, TileReference, N, V, softcap, splits, first_n,
    D: gl.constexpr, NEED_W: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    Codes += first_n
    Reference += first_n
    Target += first_n
    shared = shared_memory(E, C)
    out_tiles = gl.allocate_shared_memory(E.dtype, [4 if NEED_W else 1, ROWS, STORED], E.layout)
    gl.warp_specialize(
        [
            (_product_consumer, (shared, out_tiles, W, X, LastX, Bias, Codes, Reference, Target, Part, TileReference, N,
                                 V, softcap, splits, 0, D, NEED_W, HAS_BIAS, HAS_SOFTCAP)),
            (_product_consumer, (shared, out_tiles, W, X, LastX, Bias, Codes, Reference, Target, Part, TileReference, N,
                                 V, softcap, splits, 1, D, NEED_W, HAS_BIAS, HAS_SOFTCAP)),
            (stream, (E, C, shared, N, V, first_n, splits)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def exponentials_product(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    w_nV: torch.Tensor | None,
    x_snD: torch.Tensor,
    last_x_nD: torch.Tensor,
    arguments: tuple,
    flags: dict,
) -> Launch:
    """As hopper.exponentials, with w C by splits of the vocabulary: of all but the last split in x, contiguous. None: w is not
    kept."""
    return Launch(
        _exponentials_product_kernel,
        programs(last_x_nD.shape[0], e_ND.device, arguments[-1]),
        (*operands(e_ND, c_VD), None if w_nV is None else result(w_nV), x_snD, last_x_nD, *arguments),
        {"D": e_ND.shape[1], "NEED_W": w_nV is not None, **flags},
        **LAUNCH,
    )
