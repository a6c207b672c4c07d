"""What one pass makes gradients of."""

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """dloss * sum over tokens of (nll + z_loss lse^2).

    e [N, D], c [V, D]: bf16, `addressable` (logits.py). bias [V] or None. codes [N] int32: cce/targets.py. dloss: fp32 scalar on the
    device, not finite where all tokens are ignored.
    """

    e_ND: torch.Tensor
    c_VD: torch.Tensor
    bias_V: torch.Tensor | None
    codes_N: torch.Tensor
    dloss: torch.Tensor
    softcap: float | None
    z_loss: float
