"""Swish and SwiGLU on the CPU: swish(x) = x · σ(x), SwiGLU(x, y) = swish(x) · y, as in fla.modules.activations."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swish_fwd(x: Tensor, output_contiguous: bool = False) -> Tensor:
    return F.silu(x)


def swish_bwd(x: Tensor, dy: Tensor, output_contiguous: bool = False) -> Tensor:
    return torch.ops.aten.silu_backward(dy, x)


def swiglu_fwd(x: Tensor, y: Tensor, output_contiguous: bool = False) -> Tensor:
    return F.silu(x) * y


def swiglu_fwdbwd(x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, output_contiguous: bool = False):
    """dx, dy for the gradient g of SwiGLU(x, y), and with `use_weight` its value again."""
    swish = F.silu(x)
    dx, dy = torch.ops.aten.silu_backward(g * y, x), g * swish
    return (dx, dy, swish * y) if use_weight else (dx, dy)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The MLP's second half. FLA's own autograd function knows the autocast of GPUs only, so autograd does it here."""
    return F.linear(F.silu(x) * y, weight, bias)
