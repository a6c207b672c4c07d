"""The log-sum-exp of cce/kernels/forward.py."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce.kernels.epilogues import LOWEST, add_exponentials
from cce.kernels.hopper.host import LAUNCH, operands, walk
from cce.kernels.hopper.pipeline import (
    ROWS,
    TOKENS,
    gain,
    item_at,
    logits,
    logits_layout,
    produce,
    rows_of,
    shared_memory,
    tokens_are_read,
    tokens_have_come,
)
from cce.tiles import Tile


@gluon.jit
def _sum_consumer(
    shared, Bias, Codes, Part, PartTotal, TileMaxima, N, V, softcap, splits, half: gl.constexpr,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    NEED_TOTAL: gl.constexpr, NEED_MAXIMA: gl.constexpr, MAXIMA_V: gl.constexpr,
):  # fmt: skip
    CLASSES: gl.constexpr = shared[1].type.shape[1]
    of_rows: gl.constexpr = gl.SliceLayout(1, logits_layout(CLASSES))
    of_columns: gl.constexpr = gl.SliceLayout(0, logits_layout(CLASSES))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, split, first, last, busy = item_at(item, Codes, N, V, splits, CLASSES)
        if not busy:
            last = first
        offs_n, in_n, code = rows_of(n0, Codes, N, half, CLASSES)
        reference = gl.full([ROWS], LOWEST, gl.float32, of_rows)
        exp_sum = gl.full([ROWS], 0.0, gl.float32, of_rows)
        total = gl.full([ROWS], 0.0, gl.float32, of_rows)
        e_phase = tokens_have_come(shared, e_phase, busy, KEEP)
        for tile_v in range(first, last):
            v0 = tile_v * CLASSES
            offs_v = v0 + gl.arange(0, CLASSES, layout=of_columns)
            z, stage, phase = logits(shared, stage, phase, half, STEPS, KEEP)
            reference, exp_sum, total = add_exponentials(
                z, reference, exp_sum, total, Bias, TileMaxima, code, offs_n, in_n, offs_v, v0, N, V, softcap, CLASSES,
                HAS_BIAS, HAS_SOFTCAP, NEED_TOTAL, NEED_MAXIMA, MAXIMA_V, gain(STEPS),
            )  # fmt: skip
        tokens_are_read(shared, busy, KEEP)
        out = split.to(gl.int64) * N + offs_n
        gl.store(Part + out, reference + gl.log2(exp_sum), mask=in_n)
        if NEED_TOTAL:
            gl.store(PartTotal + out, total, mask=in_n)


# cce/kernels/forward.py says what it computes.
@gluon.jit
def _log_sum_exp_kernel(
    E, C, Bias, Codes, Part, PartTotal, TileMaxima, N, V, softcap, splits,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    NEED_TOTAL: gl.constexpr, NEED_MAXIMA: gl.constexpr, MAXIMA_V: gl.constexpr,
):  # fmt: skip
    shared = shared_memory(E, C, STEPS, KEEP)
    gl.warp_specialize(
        [
            (_sum_consumer, (shared, Bias, Codes, Part, PartTotal, TileMaxima, N, V, softcap, splits, 0, STEPS,
                             KEEP, HAS_BIAS, HAS_SOFTCAP, NEED_TOTAL, NEED_MAXIMA, MAXIMA_V)),
            (_sum_consumer, (shared, Bias, Codes, Part, PartTotal, TileMaxima, N, V, softcap, splits, 1, STEPS,
                             KEEP, HAS_BIAS, HAS_SOFTCAP, NEED_TOTAL, NEED_MAXIMA, MAXIMA_V)),
            (produce, (E, C, shared, Codes, N, V, 0, 0, splits, STEPS, KEEP, True, False)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def log_sum_exp(e_ND: torch.Tensor, c_VD: torch.Tensor, tile: Tile, arguments: tuple, flags: dict) -> None:
    """As forward.py's _log_sum_exp_kernel; arguments and flags are its own behind the operands, splits last."""
    grid, constants = walk(e_ND.shape[0], e_ND, arguments[-1])
    _log_sum_exp_kernel[grid](*operands(e_ND, c_VD, tile), *arguments, **constants, **flags, **LAUNCH)
