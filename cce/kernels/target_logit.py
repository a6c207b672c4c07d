"""Indexed dot product: each token's logit of its own target, in fp32 (paper, section 4.1)."""

import torch
import triton
import triton.language as tl

from cce.kernels.epilogues import tanh
from cce.targets import OUT_OF_RANGE
from cce.tiles import interpreting

_OUT_OF_RANGE = tl.constexpr(OUT_OF_RANGE)


# One program gathers the rows of C for BLOCK_N tokens and multiplies them with E's in fp32 (where the product of two
# bf16 or fp16 numbers is exact). Reads 2 N D numbers: bound by memory, negligible beside the logits.
@triton.jit
def _target_logit_kernel(
    E, C, Bias, Codes, Out, N, stride_e, stride_c, softcap,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    code = tl.load(Codes + offs_n, mask=offs_n < N, other=-1)
    own = code >= 0
    offs_d = tl.arange(0, BLOCK_D)
    e_ptrs = E + offs_n.to(tl.int64)[:, None] * stride_e + offs_d[None, :]
    c_ptrs = C + tl.where(own, code, 0).to(tl.int64)[:, None] * stride_c + offs_d[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        mask = own[:, None] & (offs_d[None, :] < D - d)
        e = tl.load(e_ptrs + d, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(c_ptrs + d, mask=mask, other=0.0).to(tl.float32)
        total += e * c
    z = tl.sum(total, 1)
    if HAS_BIAS:
        z += tl.load(Bias + tl.where(own, code, 0)).to(tl.float32)
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap)
    z = tl.where(own, z, tl.where(code == _OUT_OF_RANGE, float("nan"), 0.0))
    tl.store(Out + offs_n, z, mask=offs_n < N)


def target_logit(
    e_ND: torch.Tensor, c_VD: torch.Tensor, bias_V: torch.Tensor | None, codes_N: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """[N] fp32: the logit of each token's class; NaN for a target out of range, 0 for a token without a class here."""
    N, D = e_ND.shape
    out_N = torch.empty(N, dtype=torch.float32, device=e_ND.device)
    rows, columns = 16, min(16 if interpreting() else 256, triton.next_power_of_2(D))
    _target_logit_kernel[(triton.cdiv(N, rows),)](
        e_ND, c_VD, bias_V, codes_N, out_N, N, e_ND.stride(0), c_VD.stride(0), softcap or 1.0,
        D=D, BLOCK_N=rows, BLOCK_D=columns, HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None,
    )  # fmt: skip
    return out_N
