"""dC with all of its sum in registers, from logits that are computed again, for small hidden sizes.

Classes stay, tiles of tokens stream by (streaming.py): z = c e^T, g of z in the epilogue, x += g e, rounded once at the end.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from cce.kernels.epilogues import IGNORED_CODE, LOG2E, tanh
from cce.kernels.hopper.host import LAUNCH, programs
from cce.kernels.hopper.pipeline import ROWS, TOKENS, after, logits_layout, part_at
from cce.kernels.hopper.streaming import (
    COLUMNS,
    STAGES,
    begin_tile,
    end_item,
    end_tile,
    operand_layout,
    operands,
    shared_memory,
    store_sums,
    stream,
)
from cce.kernels.problem import Problem


@gluon.jit
def _gradient_consumer(
    shared, DC, Bias, Codes, Dloss, Lse, Shift, Own, N, V, stride_dc, softcap, z_loss,
    half: gl.constexpr, D: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_Z_LOSS: gl.constexpr,
):  # fmt: skip
    KD: gl.constexpr = shared[1].type.shape[2]
    dtype: gl.constexpr = shared[1].dtype
    of_rows: gl.constexpr = gl.SliceLayout(1, logits_layout(COLUMNS))
    of_columns: gl.constexpr = gl.SliceLayout(0, logits_layout(COLUMNS))
    stage, phase, c_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(V, TOKENS), gl.num_programs(0)):
        v0, _, first, last = part_at(item, V, N, 1, COLUMNS)
        v0 += half * ROWS
        offs_v = v0 + gl.arange(0, ROWS, layout=of_rows)
        if HAS_BIAS:
            bias = gl.load(Bias + offs_v, mask=offs_v < V, other=0.0).to(gl.float32)
        x = gl.zeros([ROWS, KD], gl.float32, logits_layout(KD))
        operand = gl.zeros([ROWS, COLUMNS], dtype, operand_layout(KD))
        mbarrier.wait(shared[4], c_phase)
        c_phase ^= 1
        for tile_n in range(first, last):
            offs_n = tile_n * COLUMNS + gl.arange(0, COLUMNS, layout=of_columns)
            in_n = offs_n < N
            shift = gl.load(Shift + offs_n, mask=in_n, other=float("inf"))
            code = gl.load(Codes + offs_n, mask=in_n, other=IGNORED_CODE)
            z, x = begin_tile(shared, half, stage, phase, operand, x, tile_n, first)
            if HAS_BIAS:
                z += bias[:, None]
            if HAS_SOFTCAP:
                z = softcap * tanh(z / softcap)
            g = gl.exp2(z * LOG2E - shift[None, :])  # without gain: of sums this short it is what exp2 is off by
            if HAS_SOFTCAP:
                t = z / softcap
                g *= 1 - t * t
            if HAS_Z_LOSS:
                lse = gl.load(Lse + offs_n, mask=in_n, other=0.0)
                g = gl.where((1 + 2 * z_loss * lse < 0)[None, :], -g, g)
            here = (code >= v0) & (code < v0 + ROWS)
            if gl.max(here.to(gl.int32), 0) != 0:
                own = gl.load(Own + offs_n, mask=here, other=0.0)
                g = gl.where(offs_v[:, None] == code[None, :], own[None, :], g)
            x = end_tile(shared, stage, x, tile_n, first)
            operand = gl.convert_layout(g.to(dtype), operand_layout(KD))
            stage, phase = after(stage, phase, STAGES)
        x = end_item(shared, stage, operand, x, first, last)
        x = gl.where(x == 0, 0.0, x * gl.load(Dloss))
        store_sums(DC, x, v0, V, stride_dc, D)


# dC = dloss g^T e, g = 2^(z log2e - shift), with the softcap's slope and the sign of 1 + 2 z_loss lse, and `own` for each token's
# target (shift, own: cce/kernels/kept.py: _tokens_kernel). g is rounded to e's dtype as an operand, and summed over all
# tokens in fp32. Without any token that is not ignored, dloss is not finite.
@gluon.jit
def _vocabulary_gradient_kernel(
    C, E, DC, Bias, Codes, Dloss, Lse, Shift, Own, N, V, stride_dc, softcap, z_loss,
    D: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_Z_LOSS: gl.constexpr,
):  # fmt: skip
    shared = shared_memory(C, E)
    gl.warp_specialize(
        [
            (_gradient_consumer, (shared, DC, Bias, Codes, Dloss, Lse, Shift, Own, N, V, stride_dc, softcap, z_loss, 0, D,
                                  HAS_BIAS, HAS_SOFTCAP, HAS_Z_LOSS)),
            (_gradient_consumer, (shared, DC, Bias, Codes, Dloss, Lse, Shift, Own, N, V, stride_dc, softcap, z_loss, 1, D,
                                  HAS_BIAS, HAS_SOFTCAP, HAS_Z_LOSS)),
            (stream, (C, E, shared, V, N, 0, 1)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def vocabulary_gradient(
    problem: Problem, lse_N: torch.Tensor, shift_N: torch.Tensor, own_N: torch.Tensor, dc_VD: torch.Tensor
) -> None:
    """Fill dc_VD, of any dtype. lse, shift, own: each [N] fp32, of cce/kernels/kept.py: streamed_tokens."""
    e_ND, c_VD, bias_V, codes_N, dloss, softcap, z_loss = problem
    (N, D), V = e_ND.shape, c_VD.shape[0]
    _vocabulary_gradient_kernel[programs(V, 1, e_ND.device)](
        *operands(c_VD, e_ND), dc_VD, bias_V, codes_N, dloss, lse_N, shift_N, own_N, N, V, dc_VD.stride(0),
        softcap or 1.0, z_loss, D=D, HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None, HAS_Z_LOSS=z_loss != 0, **LAUNCH,
    )  # fmt: skip
