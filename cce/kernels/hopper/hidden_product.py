"""w C, what dE is made of, with all of its sum in registers, and the sums of w, for small hidden sizes.

Tokens stay, tiles of c stream by (streaming.py): z = e c^T, w of z in the epilogue, x += w c. Where a token's reference moves, its x
is brought to it.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from cce.kernels.epilogues import kept_exponentials, starting_reference, store_reference
from cce.kernels.hopper.host import LAUNCH, programs
from cce.kernels.hopper.pipeline import DEPTH, ROWS, TOKENS, after, gain, logits_layout, part_at, rows_of
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
from cce.kernels.launch import Launch
from cce.kernels.problem import Problem


@gluon.jit
def _product_consumer(
    shared, X, Bias, Codes, Reference, Part, LastReference, N, V, softcap, splits,
    half: gl.constexpr, D: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    KD: gl.constexpr = shared[1].type.shape[2]
    dtype: gl.constexpr = shared[1].dtype
    of_rows: gl.constexpr = gl.SliceLayout(1, logits_layout(COLUMNS))
    of_columns: gl.constexpr = gl.SliceLayout(0, logits_layout(COLUMNS))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, split, first, last = part_at(item, N, V, splits, COLUMNS)
        offs_n, in_n, code = rows_of(n0, Codes, N, half, COLUMNS)
        reference = starting_reference(Reference, offs_n, in_n)
        exp_sum = gl.full([ROWS], 0.0, gl.float32, of_rows)
        x = gl.zeros([ROWS, KD], gl.float32, logits_layout(KD))
        operand = gl.zeros([ROWS, COLUMNS], dtype, operand_layout(KD))
        mbarrier.wait(shared[4], e_phase)
        e_phase ^= 1
        for tile_v in range(first, last):
            v0 = tile_v * COLUMNS
            offs_v = v0 + gl.arange(0, COLUMNS, layout=of_columns)
            z, x = begin_tile(shared, half, stage, phase, operand, x, tile_v, first)
            before = reference
            w, reference, exp_sum, seldom = kept_exponentials(
                z, reference, exp_sum, Bias, LastReference, code, offs_n, in_n, offs_v, split, v0, N, V, softcap,
                COLUMNS, HAS_BIAS, HAS_SOFTCAP, gain(KD // DEPTH),
            )  # fmt: skip
            x = end_tile(shared, stage, x, tile_v, first)
            if seldom:
                factor = gl.convert_layout(gl.exp2(before - reference), gl.SliceLayout(1, x.type.layout))
                x = x * factor[:, None]
            operand = gl.convert_layout(w.to(dtype), operand_layout(KD))
            stage, phase = after(stage, phase, STAGES)
        x = end_item(shared, stage, operand, x, first, last)
        gl.store(Part + split.to(gl.int64) * N + offs_n, reference + gl.log2(exp_sum), mask=in_n)
        store_reference(LastReference, reference, split, offs_n, in_n, N)
        store_sums(X + split.to(gl.int64) * N * D, x, n0 + half * ROWS, N, D, D)


# X [splits, N, D] fp32: w C of a split of the vocabulary, w and its sums in Part those of cce/kernels/kept.py, in units of
# 2^-LastReference [splits, N], the reference of the split's last tile. w is rounded to e's dtype as an operand.
@gluon.jit
def _hidden_product_kernel(
    E, C, X, Bias, Codes, Reference, Part, LastReference, N, V, softcap, splits, first_n,
    D: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    Codes += first_n
    Reference += first_n
    shared = shared_memory(E, C)
    gl.warp_specialize(
        [
            (_product_consumer, (shared, X, Bias, Codes, Reference, Part, LastReference, N, V, softcap, splits, 0,
                                 D, HAS_BIAS, HAS_SOFTCAP)),
            (_product_consumer, (shared, X, Bias, Codes, Reference, Part, LastReference, N, V, softcap, splits, 1,
                                 D, HAS_BIAS, HAS_SOFTCAP)),
            (stream, (E, C, shared, N, V, first_n, splits)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def hidden_product(
    problem: Problem,
    target_N: torch.Tensor,
    x_snD: torch.Tensor,
    parts: torch.Tensor,
    references: torch.Tensor,
) -> Launch:
    """launch(first): fill x_snD [splits, n, D] and parts and references [splits, n], all fp32 and contiguous, for n tokens.

    target_N: as for cce/kernels/kept.py: exponentials.
    """
    e_ND, c_VD, bias_V, codes_N, _, softcap, _ = problem
    splits, n, D = x_snD.shape
    return Launch(
        _hidden_product_kernel,
        programs(n, splits, e_ND.device),
        (
            *operands(e_ND, c_VD), x_snD, bias_V, codes_N, target_N, parts, references, n, c_VD.shape[0],
            softcap or 1.0, splits,
        ),
        dict(D=D, HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None),
        **LAUNCH,
    )  # fmt: skip
