"""The gradient of the logits of cce/kernels/gradient.py."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from cce.kernels.epilogues import logit_gradients, seldom_in, upstream_of
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
def _gradient_consumer(
    shared, out_tiles, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, first_v, width, softcap, smoothing, uniform, splits,
    half: gl.constexpr, STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_DLSE: gl.constexpr, HAS_SMOOTHING: gl.constexpr,
):  # fmt: skip
    CLASSES: gl.constexpr = shared[1].type.shape[1]
    of_columns: gl.constexpr = gl.SliceLayout(0, logits_layout(BLOCK))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, _, first, last, busy = item_at(item, Codes, N, width, splits, CLASSES)
        offs_n, in_n, code = rows_of(n0, Codes, N, half, BLOCK)
        n0 += half * ROWS
        if busy:
            lse2, dloss, dlse = upstream_of(Lse, Dloss, Dlse, code, offs_n, in_n, HAS_DLSE)
            e_phase = tokens_have_come(shared, e_phase, True, KEEP)
            if KEEP:
                z, stage, phase = logits(shared, stage, phase, half, STEPS, KEEP)
            for tile_v in range(first, last):
                v0 = first_v + tile_v * CLASSES
                offs_v = v0 + gl.arange(0, BLOCK, layout=of_columns)
                if KEEP:
                    following, stage, phase = begin_logits(shared, stage, phase, half, STEPS)
                    left = z
                else:
                    z, stage, phase = logits(shared, stage, phase, half, STEPS, KEEP)
                    left, right = blocks(z)
                seldom = seldom_in(code, v0, CLASSES)
                g = logit_gradients(
                    left, seldom, Bias, Expm1, lse2, dloss, dlse, code, offs_n, offs_v, V, softcap, smoothing, uniform,
                    HAS_BIAS, HAS_SOFTCAP, HAS_DLSE, HAS_SMOOTHING, gain(STEPS),
                )  # fmt: skip
                if KEEP:
                    z = end_logits(shared, following, stage, STEPS)
                store_rounded(G, out_tiles, g, n0, tile_v * CLASSES, half)
                if not KEEP:
                    g = logit_gradients(
                        right, seldom, Bias, Expm1, lse2, dloss, dlse, code, offs_n, offs_v + BLOCK, V, softcap,
                        smoothing, uniform, HAS_BIAS, HAS_SOFTCAP, HAS_DLSE, HAS_SMOOTHING, gain(STEPS),
                    )  # fmt: skip
                    store_rounded(G, out_tiles, g, n0, tile_v * CLASSES + BLOCK, half)
            tokens_are_read(shared, True, KEEP)
        else:
            g = gl.zeros([ROWS, BLOCK], gl.float32, logits_layout(BLOCK))
            for block in range(first * (CLASSES // BLOCK), last * (CLASSES // BLOCK)):
                store_rounded(G, out_tiles, g, n0, block * BLOCK, half)
    tma.store_wait(0)


# cce/kernels/gradient.py says what it computes.
@gluon.jit
def _logit_gradient_kernel(
    E, C, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, width, softcap, smoothing, uniform, splits, first_v,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_DLSE: gl.constexpr,
    HAS_SMOOTHING: gl.constexpr,
):  # fmt: skip
    shared = shared_memory(E, C, STEPS, KEEP)
    out_tiles = gl.allocate_shared_memory(G.dtype, [2, ROWS, BLOCK], G.layout)
    gl.warp_specialize(
        [
            (_gradient_consumer, (shared, out_tiles, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, first_v, width,
                                  softcap, smoothing, uniform, splits, 0, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP, HAS_DLSE,
                                  HAS_SMOOTHING)),
            (_gradient_consumer, (shared, out_tiles, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, first_v, width,
                                  softcap, smoothing, uniform, splits, 1, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP, HAS_DLSE,
                                  HAS_SMOOTHING)),
            (produce, (E, C, shared, Codes, N, width, 0, first_v, splits, STEPS, KEEP, True, KEEP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def logit_gradient(
    e_ND: torch.Tensor, c_VD: torch.Tensor, g_Nw: torch.Tensor, tile: Tile, arguments: tuple, flags: dict
) -> Launch:
    """As gradient.py's _logit_gradient_kernel, without filter and sums for a bias; arguments: splits last."""
    grid, constants = walk(e_ND.shape[0], e_ND, arguments[-1])
    return Launch(
        _logit_gradient_kernel,
        grid,
        (*operands(e_ND, c_VD, tile), result(g_Nw), *arguments),
        {**constants, **flags},
        **LAUNCH,
    )
