"""What finishes the gradients of one pass (cce/kernels/chunked.py): each row of dE, the targets' entries of dC, the upstream factor."""

import torch
import triton
import triton.language as tl

from cce.kernels.launch import Launch
from cce.tiles import MULTIPROCESSORS, interpreting


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


@triton.jit
def _run(E, Own, Codes, Order, at, end, code, offs_d, N, D, stride_e, BLOCK_N: tl.constexpr):
    """Sum of own e over the sorted tokens from `at` to `end` (at most BLOCK_N) whose target is `code`."""
    offs_n = at + tl.arange(0, BLOCK_N)
    same = tl.load(Codes + offs_n, mask=offs_n < tl.minimum(end, N), other=-1) == code
    token = tl.load(Order + offs_n, mask=same, other=0)
    own = tl.load(Own + token, mask=same, other=0.0)
    rows = E + token.to(tl.int64)[:, None] * stride_e + offs_d[None, :]
    e = tl.load(rows, mask=same[:, None] & (offs_d < D)[None, :], other=0.0).to(tl.float32)
    return tl.sum(e * own[:, None], 0)


# Tokens come sorted by target, in blocks of BLOCK_N: a block of one target only writes its sum of own e to Sums. Frequent words
# make runs of thousands of tokens; their blocks are summed side by side.
@triton.jit
def _block_sums_kernel(E, Own, Codes, Order, Sums, N, D, stride_e, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    block = tl.program_id(0)
    first = block * BLOCK_N
    code = tl.load(Codes + first)
    if tl.load(Codes + first + BLOCK_N - 1, mask=first + BLOCK_N <= N, other=-1) == code:
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = _run(E, Own, Codes, Order, first, first + BLOCK_N, code, offs_d, N, D, stride_e, BLOCK_N)
        tl.store(Sums + tl.cast(block, tl.int64) * D + offs_d, total, mask=offs_d < D)


# dC[v] += sum over the tokens whose target is v of own_n e_n. The program of a run's first token adds up the run in the order of
# tokens: single steps to the next whole block, the sums of whole blocks of this target, single steps to the end. The total is
# added to dC, with its compensation where KAHAN.
@triton.jit
def _target_rows_kernel(
    E, Own, Codes, Order, Sums, DC, Comp, N, D, stride_e, stride_dc,
    STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, KAHAN: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    code = tl.load(Codes + first)
    before = tl.load(Codes + first - 1, mask=first > 0, other=-1)
    if (code >= 0) & (code != before):
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = offs_d < D
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        at = first
        while tl.load(Codes + at, mask=at < N, other=-1) == code:
            ends = at + (tl.arange(0, BLOCKS) + 1) * BLOCK_N - 1
            whole = (tl.load(Codes + ends, mask=ends < N, other=-1) == code) & (at % BLOCK_N == 0)
            count = tl.sum(whole.to(tl.int32), 0)
            if count > 0:
                rows = (at // BLOCK_N + tl.arange(0, BLOCKS)).to(tl.int64)[:, None]
                sums = tl.load(Sums + rows * D + offs_d[None, :], mask=whole[:, None] & in_d[None, :], other=0.0)
                total += tl.sum(sums, 0)
                at += count * BLOCK_N
            else:
                end = (at // STEP + 1) * STEP
                total += _run(E, Own, Codes, Order, at, end, code, offs_d, N, D, stride_e, STEP)
                at = end
        out = tl.cast(code, tl.int64) * stride_dc + offs_d
        if KAHAN:
            total -= tl.load(Comp + out, mask=in_d, other=0.0).to(tl.float32)
        old = tl.load(DC + out, mask=in_d, other=0.0).to(tl.float32)
        tl.store(DC + out, (old + total).to(DC.dtype.element_ty), mask=in_d)


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


def add_target_rows(
    e_ND: torch.Tensor, own_N: torch.Tensor, codes_N: torch.Tensor, dc_VD: torch.Tensor, comp_VD: torch.Tensor | None
) -> None:
    """dc[v] += sum of own_n e_n over the tokens whose target is v, in the order of tokens; comp as in add_product."""
    N, D = e_ND.shape
    codes, order = codes_N.sort(stable=True)
    columns, block = min(1024, triton.next_power_of_2(D)), 8 if interpreting() else 64
    programs_d = triton.cdiv(D, columns)
    sums = torch.empty(triton.cdiv(N, block), D, dtype=torch.float32, device=e_ND.device)
    _block_sums_kernel[(sums.shape[0], programs_d)](
        e_ND, own_N, codes, order, sums, N, D, e_ND.stride(0), BLOCK_N=block, BLOCK_D=columns
    )
    _target_rows_kernel[(N, programs_d)](
        e_ND, own_N, codes, order, sums, dc_VD, comp_VD, N, D, e_ND.stride(0), dc_VD.stride(0),
        STEP=block // 4, BLOCK_N=block, BLOCKS=16, BLOCK_D=columns, KAHAN=comp_VD is not None,
    )  # fmt: skip


def scale_in_place(matrix: torch.Tensor, factor: torch.Tensor) -> None:
    """matrix (contiguous) *= factor, an fp32 scalar on the device; costs nothing when it is 1."""
    count, block = matrix.numel(), 4096
    _scale_kernel[(min(triton.cdiv(count, block), 8 * MULTIPROCESSORS),)](matrix, factor, count, BLOCK=block)
