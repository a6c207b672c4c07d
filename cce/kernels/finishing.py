"""What finishes the gradients of one pass (cce/kernels/chunked.py): each row of dE, each row of dC, the upstream factor."""

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
def _run(E, Own, Order, at, end, offs_d, D, stride_e, BLOCK_N: tl.constexpr):
    """Sum of own e over the sorted tokens from `at` to `end`, at most BLOCK_N."""
    offs_n = at + tl.arange(0, BLOCK_N)
    token = tl.load(Order + offs_n, mask=offs_n < end, other=0)
    own = tl.load(Own + token, mask=offs_n < end, other=0.0)
    rows = E + token.to(tl.int64)[:, None] * stride_e + offs_d[None, :]
    e = tl.load(rows, mask=(offs_n < end)[:, None] & (offs_d < D)[None, :], other=0.0).to(tl.float32)
    return tl.sum(e * own[:, None], 0)


# Tokens come sorted by target, in blocks of BLOCK_N: a block of one target only writes its sum of own e to Sums. Frequent words
# make runs of thousands of tokens; their blocks are summed side by side.
@triton.jit
def _block_sums_kernel(E, Own, Codes, Order, Sums, N, D, stride_e, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    block = tl.program_id(0)
    first = block * BLOCK_N
    code = tl.load(Codes + first)
    if (code >= 0) & (tl.load(Codes + first + BLOCK_N - 1, mask=first + BLOCK_N <= N, other=-1) == code):
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = _run(E, Own, Order, first, first + BLOCK_N, offs_d, D, stride_e, BLOCK_N)
        tl.store(Sums + tl.cast(block, tl.int64) * D + offs_d, total, mask=offs_d < D)


# dC[v] = x[v] + sum over the tokens whose target is v of own_n e_n, in the order of tokens, rounded once. X and DC begin with class
# first_v. A run of tokens: single steps to the next whole block, the sums of whole blocks, single steps to the end.
# KAHAN: x is rounded, and carries its error in Comp.
@triton.jit
def _class_rows_kernel(
    X, Comp, DC, E, Own, Order, Offsets, Sums, first_v, D, stride_x, stride_dc, stride_e,
    STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, KAHAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    total = tl.load(X + row * stride_x + offs_d, mask=in_d, other=0.0).to(tl.float32)
    if KAHAN:
        total -= tl.load(Comp + row * stride_x + offs_d, mask=in_d, other=0.0).to(tl.float32)
    at = tl.load(Offsets + first_v + row)
    end = tl.load(Offsets + first_v + row + 1)
    while at < end:
        whole = tl.where(at % BLOCK_N == 0, tl.minimum((end - at) // BLOCK_N, BLOCKS), 0)
        if whole > 0:
            block = tl.arange(0, BLOCKS)
            rows = (at // BLOCK_N + block).to(tl.int64)[:, None]
            sums = tl.load(Sums + rows * D + offs_d[None, :], mask=(block < whole)[:, None] & in_d[None, :], other=0.0)
            total += tl.sum(sums, 0)
            at += whole * BLOCK_N
        else:
            stop = tl.minimum((at // STEP + 1) * STEP, end)
            total += _run(E, Own, Order, at, stop, offs_d, D, stride_e, STEP)
            at = stop
    tl.store(DC + row * stride_dc + offs_d, total.to(DC.dtype.element_ty), mask=in_d)


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


class TokensByTarget:
    """The targets' entries of dC's gradient, for class_rows: own_n e_n, tokens sorted by target.

    e [N, D]; own [N] fp32; codes [N]: cce/targets.py.
    """

    BLOCKS_AT_ONCE = 16

    def __init__(self, e_ND: torch.Tensor, own_N: torch.Tensor, codes_N: torch.Tensor, vocabulary: int):
        (N, D), device = e_ND.shape, e_ND.device
        self.e_ND, self.own_N = e_ND, own_N
        codes, self.order = codes_N.sort(stable=True)
        classes = torch.arange(vocabulary + 1, dtype=torch.int32, device=device)
        self.offsets = torch.searchsorted(codes, classes, out_int32=True)
        self.block = 8 if interpreting() else 64
        self.columns = min(1024, triton.next_power_of_2(D))
        self.sums = torch.empty(triton.cdiv(N, self.block), D, dtype=torch.float32, device=device)
        _block_sums_kernel[(self.sums.shape[0], triton.cdiv(D, self.columns))](
            e_ND, own_N, codes, self.order, self.sums, N, D, e_ND.stride(0), BLOCK_N=self.block, BLOCK_D=self.columns
        )

    def class_rows(self, x_vD: torch.Tensor, comp_vD: torch.Tensor | None, first: int, dc_vD: torch.Tensor) -> None:
        """dc = x + the targets' entries, rounded once; the rows are those of classes from `first` on. x may be dc; comp: add_product."""
        rows, D = x_vD.shape
        _class_rows_kernel[(rows, triton.cdiv(D, self.columns))](
            x_vD, comp_vD, dc_vD, self.e_ND, self.own_N, self.order, self.offsets, self.sums, first, D, x_vD.stride(0),
            dc_vD.stride(0), self.e_ND.stride(0), STEP=self.block // 4, BLOCK_N=self.block, BLOCKS=self.BLOCKS_AT_ONCE,
            BLOCK_D=self.columns, KAHAN=comp_vD is not None,
        )  # fmt: skip


def scale_in_place(matrix: torch.Tensor, factor: torch.Tensor) -> None:
    """matrix (contiguous) *= factor, an fp32 scalar on the device; costs nothing when it is 1."""
    count, block = matrix.numel(), 4096
    _scale_kernel[(min(triton.cdiv(count, block), 8 * MULTIPROCESSORS),)](matrix, factor, count, BLOCK=block)
