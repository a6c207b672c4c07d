"""What the kernels share: a tile of logits from fp32 accumulators, the softcap, the order of programs.

Shapes: N tokens, D hidden, V vocabulary. Offsets of rows are int64, so N * V and V * D may exceed 2^31.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def precision(dtype: torch.dtype) -> str:
    """How `dot` takes its operands: fp32 ones as PyTorch's own matrix products do; bf16 and fp16 ones as they are.

    "widen" makes bf16 operands fp32 first, the same numbers, for the interpreter, whose tl.dot reads bf16 as integers.
    """
    if dtype == torch.float32:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "widen" if interpreting() and dtype == torch.bfloat16 else "ieee"


def rows_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself if its rows are contiguous (at any distance), else a copy."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


@triton.jit
def grouped(pid, rows, columns, GROUP: tl.constexpr):
    """(row, column) of a tile: down GROUP rows, then the next column, so that both operands stay in L2."""
    group = pid // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    within = pid % (GROUP * columns)
    return group * GROUP + within % height, within // height


@triton.jit
def tanh(x):
    """tanh to fp32 precision: its series near 0, where the quotient of exponentials would cancel."""
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    t = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -t, t))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b with fp32 accumulators."""
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def raw_logits(
    E, C, Bias, rows_n, rows_v, stride_e, stride_c,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """e_n . c_v + bias_v for the given rows (all in range), in fp32, before the softcap."""
    offs_d = tl.arange(0, BLOCK_D)
    e_ptrs = E + rows_n.to(tl.int64)[:, None] * stride_e + offs_d[None, :]
    c_ptrs = C + rows_v.to(tl.int64)[None, :] * stride_c + offs_d[:, None]
    z = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        if D % BLOCK_D == 0:
            e = tl.load(e_ptrs)
            c = tl.load(c_ptrs)
        else:
            e = tl.load(e_ptrs, mask=offs_d[None, :] < D - d, other=0.0)
            c = tl.load(c_ptrs, mask=offs_d[:, None] < D - d, other=0.0)
        z = dot(e, c, z, PRECISION)
        e_ptrs += BLOCK_D
        c_ptrs += BLOCK_D
    if HAS_BIAS:
        z += tl.load(Bias + rows_v).to(tl.float32)[None, :]
    return z
