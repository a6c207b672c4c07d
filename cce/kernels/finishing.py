"""What finishes the gradients of one pass (cce/kernels/chunked.py): each row of dE, the targets' entries for dC, the upstream factor."""

import torch
import triton
import triton.language as tl

from cce.kernels.exponentials import Kept
from cce.kernels.launch import Launch
from cce.tiles import MULTIPROCESSORS


# dE = scale (w C) + own c_target, rounded once, for the N tokens of x from the first_n-th on.
@triton.jit
def _hidden_gradient_kernel(
    X, DE, Scale, Own, C, Codes, N, D, stride_x, stride_de, stride_c, first_n,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    Scale += first_n
    Own += first_n
    Codes += first_n
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (offs_n < N)[:, None] & (offs_d < D)[None, :]
    rows = offs_n.to(tl.int64)[:, None]
    scale = tl.load(Scale + offs_n, mask=offs_n < N, other=0.0)
    own = tl.load(Own + offs_n, mask=offs_n < N, other=0.0)
    code = tl.load(Codes + offs_n, mask=offs_n < N, other=-1)
    x = tl.load(X + rows * stride_x + offs_d[None, :], mask=mask, other=0.0) * scale[:, None]
    at = C + tl.maximum(code, 0).to(tl.int64)[:, None] * stride_c + offs_d[None, :]
    x += tl.load(at, mask=mask & (code >= 0)[:, None], other=0.0).to(tl.float32) * own[:, None]
    tl.store(DE + (first_n + rows) * stride_de + offs_d[None, :], x.to(DE.dtype.element_ty), mask=mask)


# The target's entry of w, own / scale, in its place (Left: classes below left_V). For N tokens from the first_n-th on, with which Left
# and Right begin.
@triton.jit
def _target_entries_kernel(
    Left, Right, Scale, Own, Codes, N, left_V, stride_left, stride_right, first_n, BLOCK_N: tl.constexpr
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    code = tl.load(Codes + first_n + offs_n, mask=in_n, other=-1)
    scale = tl.load(Scale + first_n + offs_n, mask=in_n, other=0.0)
    own = tl.load(Own + first_n + offs_n, mask=in_n, other=0.0)
    # Without a scale there is no gradient: the token is ignored, or dloss is 0.
    entry = tl.where(scale == 0, 0.0, own / scale).to(Left.dtype.element_ty)
    rows = offs_n.to(tl.int64)
    tl.store(Left + rows * stride_left + code, entry, mask=in_n & (code >= 0) & (code < left_V))
    tl.store(Right + rows * stride_right + code - left_V, entry, mask=in_n & (code >= left_V))


# In place, and without a look from the host: where the factor is 1 the programs, few, end at once.
@triton.jit
def _scale_kernel(X, Factor, count, BLOCK: tl.constexpr):
    factor = tl.load(Factor)
    if factor != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(X + offs, mask=offs < count, other=0.0).to(tl.float32)
            tl.store(X + offs, (x * factor).to(X.dtype.element_ty), mask=offs < count)


def hidden_gradient(
    x_nD: torch.Tensor,
    scale_N: torch.Tensor,
    own_N: torch.Tensor,
    c_VD: torch.Tensor,
    codes_N: torch.Tensor,
    de_ND: torch.Tensor,
) -> Launch:
    """launch(first): rows first to first + n of dE = scale x + own c_target, rounded once to dE's dtype; x = w C in fp32."""
    n, D = x_nD.shape
    rows, columns = 4, min(512, triton.next_power_of_2(D))
    return Launch(
        _hidden_gradient_kernel,
        (triton.cdiv(n, rows), triton.cdiv(D, columns)),
        (x_nD, de_ND, scale_N, own_N, c_VD, codes_N, n, D, x_nD.stride(0), de_ND.stride(0), c_VD.stride(0)),
        dict(BLOCK_N=rows, BLOCK_D=columns),
    )


def target_entries(w: Kept, scale_N: torch.Tensor, own_N: torch.Tensor, codes_N: torch.Tensor) -> Launch:
    """launch(first): own / scale of tokens first to first + n, in their targets' columns of w [n, V]."""
    left, right = w
    right = left if right is None else right  # no class is there
    n, block = left.shape[0], 128
    return Launch(
        _target_entries_kernel,
        (triton.cdiv(n, block),),
        (left, right, scale_N, own_N, codes_N, n, left.shape[1], left.stride(0), right.stride(0)),
        dict(BLOCK_N=block),
    )


def scale_in_place(matrix: torch.Tensor, factor: torch.Tensor) -> None:
    """matrix (contiguous) *= factor, an fp32 scalar on the device; costs nothing when it is 1."""
    count, block = matrix.numel(), 4096
    _scale_kernel[(min(triton.cdiv(count, block), 8 * MULTIPROCESSORS),)](matrix, factor, count, BLOCK=block)
