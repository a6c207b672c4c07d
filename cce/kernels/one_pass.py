"""Loss and gradients in one pass over the tokens, in one of two ways: chunked.py, streamed.py.

The gradients are those of the loss with the upstream gradient 1 (cce/function.py multiplies it in).
"""

import torch

from cce.kernels.chunked import chunked
from cce.kernels.logits import addressable
from cce.kernels.problem import Problem
from cce.kernels.streamed import streamed
from cce.plans import Sum


def one_pass(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    dloss: torch.Tensor,
    softcap: float | None,
    z_loss: float,
    chunk: int,
    kept: Sum,
    needs: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(nll [N], lse [N], dE [N, D], dC [V, D]); dE and dC are gradients of dloss * sum(nll + z_loss lse^2), in `dtypes`.

    e, c: bf16. dloss: fp32 scalar on the device. chunk: tokens at a time. kept: how the sum of dC is. needs: which of dE, dC.
    """
    (N, D), V, device = e_ND.shape, c_VD.shape[0], e_ND.device
    need_e, need_c = needs
    e_ND, c_VD = addressable(e_ND), addressable(c_VD)
    padded = e_ND.shape[1]
    tokens = torch.empty(4, N, dtype=torch.float32, device=device)
    de_ND = torch.empty(N, padded, dtype=dtypes[0], device=device) if need_e else None
    dc_VD = torch.empty(V, padded, dtype=dtypes[1], device=device) if need_c else None
    problem = Problem(e_ND, c_VD, bias_V, codes_N, dloss, softcap, z_loss)
    if kept == "registers":
        streamed(problem, min(chunk, N), tokens, de_ND, dc_VD)
    else:
        chunked(problem, min(chunk, N), tokens, de_ND, dc_VD, kept)
    nll_N, lse_N, *_ = tokens
    return nll_N, lse_N, _without_padding(de_ND, D), _without_padding(dc_VD, D)


def _without_padding(gradient: torch.Tensor | None, hidden: int) -> torch.Tensor | None:
    return gradient if gradient is None or gradient.shape[1] == hidden else gradient[:, :hidden].contiguous()
