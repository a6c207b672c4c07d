"""The kept exponentials of cce/kernels/kept.py."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from cce.kernels.epilogues import (
    exponentials_of,
    logits_to_keep,
    starting_reference,
    store_reference,
)
from cce.kernels.hopper.host import LAUNCH, operands, result, walk
from cce.kernels.hopper.pipeline import (
    BLOCK,
    ROWS,
    TOKENS,
    begin_logits,
    blocks,
    end_logits,
    gain,
    item_at,
    logits,
    logits_layout,
    of_rows,
    produce,
    rows_of,
    shared_memory,
    store_rounded,
    tokens_are_read,
    tokens_have_come,
)
from cce.kernels.launch import Launch
from cce.tiles import Tile


@gluon.jit
def _store_exponentials(
    Out, out_tiles, z, reference, exp_sum, softcap, n0, v0, half: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, GAIN: gl.constexpr,
):  # fmt: skip
    """Write the exponentials of a wide tile of logits_to_keep; exp_sum with theirs."""
    CLASSES: gl.constexpr = z.shape[1]
    left, right = blocks(z)
    of_block = of_rows(reference, BLOCK)
    total = of_rows(exp_sum, BLOCK)
    w, total = exponentials_of(left, of_block, total, softcap, HAS_BIAS, HAS_SOFTCAP, GAIN)
    store_rounded(Out, out_tiles, w, n0, v0, half)
    w, total = exponentials_of(right, of_block, total, softcap, HAS_BIAS, HAS_SOFTCAP, GAIN)
    store_rounded(Out, out_tiles, w, n0, v0 + BLOCK, half)
    return of_rows(total, CLASSES)


@gluon.jit
def _exponentials_consumer(
    shared, out_tiles, Left, Right, Bias, Codes, Reference, Part, TileReference, N, V, left_V, softcap, splits,
    half: gl.constexpr, STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    CLASSES: gl.constexpr = shared[1].type.shape[1]
    of_columns: gl.constexpr = gl.SliceLayout(0, logits_layout(CLASSES))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, split, first, last, _ = item_at(item, Codes, N, V, splits, CLASSES)
        offs_n, in_n, code = rows_of(n0, Codes, N, half, CLASSES)
        reference = starting_reference(Reference, offs_n, in_n)
        exp_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, logits_layout(CLASSES)))
        e_phase = tokens_have_come(shared, e_phase, True, KEEP)
        if KEEP:
            z, stage, phase = logits(shared, stage, phase, half, STEPS, KEEP)
        for tile_v in range(first, last):
            v0 = tile_v * CLASSES
            offs_v = v0 + gl.arange(0, CLASSES, layout=of_columns)
            if KEEP:
                following, stage, phase = begin_logits(shared, stage, phase, half, STEPS)
            else:
                z, stage, phase = logits(shared, stage, phase, half, STEPS, KEEP)
            z, reference, exp_sum, seldom = logits_to_keep(
                z, reference, exp_sum, Bias, TileReference, code, offs_n, in_n, offs_v, tile_v, v0, N, V, softcap,
                CLASSES, HAS_BIAS, HAS_SOFTCAP, gain(STEPS),
            )  # fmt: skip
            if KEEP:
                w, exp_sum = exponentials_of(z, reference, exp_sum, softcap, HAS_BIAS, HAS_SOFTCAP, gain(STEPS))
                z = end_logits(shared, following, stage, STEPS)
                if v0 < left_V:
                    store_rounded(Left, out_tiles, w, n0 + half * ROWS, v0, half)
                else:
                    store_rounded(Right, out_tiles, w, n0 + half * ROWS, v0 - left_V, half)
            elif v0 < left_V:
                exp_sum = _store_exponentials(
                    Left, out_tiles, z, reference, exp_sum, softcap, n0 + half * ROWS, v0, half,
                    HAS_BIAS, HAS_SOFTCAP, gain(STEPS),
                )  # fmt: skip
            else:
                exp_sum = _store_exponentials(
                    Right, out_tiles, z, reference, exp_sum, softcap, n0 + half * ROWS, v0 - left_V, half,
                    HAS_BIAS, HAS_SOFTCAP, gain(STEPS),
                )  # fmt: skip
            store_reference(TileReference, reference, tile_v, offs_n, in_n, N)
        tokens_are_read(shared, True, KEEP)
        gl.store(Part + split.to(gl.int64) * N + offs_n, reference + gl.log2(exp_sum), mask=in_n)
    tma.store_wait(0)


# cce/kernels/kept.py says what it computes.
@gluon.jit
def _exponentials_kernel(
    E, C, Left, Right, Bias, Codes, Reference, Part, TileReference, N, V, left_V, softcap, splits, first_n,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    Codes += first_n
    Reference += first_n
    shared = shared_memory(E, C, STEPS, KEEP)
    out_tiles = gl.allocate_shared_memory(Left.dtype, [2, ROWS, BLOCK], Left.layout)
    gl.warp_specialize(
        [
            (_exponentials_consumer, (shared, out_tiles, Left, Right, Bias, Codes, Reference, Part, TileReference, N, V,
                                      left_V, softcap, splits, 0, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP)),
            (_exponentials_consumer, (shared, out_tiles, Left, Right, Bias, Codes, Reference, Part, TileReference, N, V,
                                      left_V, softcap, splits, 1, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP)),
            (produce, (E, C, shared, Codes, N, V, first_n, 0, splits, STEPS, KEEP, False, KEEP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def exponentials(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    tile: Tile,
    arguments: tuple,
    flags: dict,
) -> Launch:
    """As kept.py's _exponentials_kernel; for the tokens of left [n, left_V] and right [n, V - left_V]."""
    grid, constants = walk(left.shape[0], e_ND, arguments[-1])
    return Launch(
        _exponentials_kernel,
        grid,
        (*operands(e_ND, c_VD, tile), result(left), result(right), *arguments),
        {**constants, **flags},
        **LAUNCH,
    )
