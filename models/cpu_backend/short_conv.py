"""The depthwise causal convolution before the mixers, on the CPU: signatures of fla.modules.causal_conv1d.

y_t = act(Σ_i w_i · x_{t−W+1+i} + bias) + residual_t, x before the sequence taken from the state (zero without one).
Shapes: x (B, T, D), weight (D, W), state (B, D, W) with the last W inputs, of which the convolution sees W − 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.cpu_backend.chunks import compute_dtype


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    **_,
) -> tuple[Tensor, Tensor | None]:
    shape = x.shape
    x = x.flatten(2)
    history = with_history(x, weight, initial_state)
    z = convolved(history, weight, bias)
    y = F.silu(z) if activation else z
    if residual is not None:
        y = y + residual.flatten(2)
    state = history[:, -weight.shape[1] :].mT.to(x.dtype).contiguous() if output_final_state else None
    return y.to(x.dtype).view(shape), state


def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    **_,
):
    """Returns dx, dweight, dbias, dresidual and dinitial_state; None where there is no such input."""
    shape, (_, width) = x.shape, weight.shape
    x = x.flatten(2)
    history = with_history(x, weight, initial_state)
    length = x.shape[1]
    dz = dy.reshape_as(x).to(history.dtype)
    if activation:
        dz = torch.ops.aten.silu_backward(dz, convolved(history, weight, bias))
    w = weight.to(dz.dtype)
    d_history = torch.zeros_like(history)
    dw = torch.empty_like(w)
    for i in range(width):
        seen = slice(i + 1, i + 1 + length)
        d_history[:, seen] += dz * w[:, i]
        dw[:, i] = (dz * history[:, seen]).sum((0, 1))
    if dht is not None:
        d_history[:, -width:] += dht.mT.to(dz.dtype)
    return (
        d_history[:, width:].to(x.dtype).reshape(shape),
        dw.to(weight.dtype),
        None if bias is None else dz.sum((0, 1)).to(bias.dtype),
        None if residual is None else dy,
        None if initial_state is None else d_history[:, :width].mT.to(initial_state.dtype).contiguous(),
    )


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token a sequence: x holds N·D values, `cache` (N, D, W) is moved on in place."""
    y, state = causal_conv1d_fwd(
        x.reshape(cache.shape[0], 1, -1), weight, bias, None, cache, output_final_state=True, activation=activation
    )
    cache.copy_(state)
    y = y.view(x.shape)
    return (y if residual is None else y + residual), cache


def with_history(x: Tensor, weight: Tensor, initial_state: Tensor | None) -> Tensor:
    """(B, W + T, D): the W inputs before the sequence, then x, in the compute dtype."""
    x = x.to(compute_dtype(x))
    if initial_state is None:
        return F.pad(x, (0, 0, weight.shape[1], 0))
    return torch.cat([initial_state.mT.to(x.dtype), x], dim=1)


def convolved(history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, W + T, D) → (B, T, D), before the activation."""
    w, width = weight.to(history.dtype), weight.shape[1]
    length = history.shape[1] - width
    z = sum(history[:, i + 1 : i + 1 + length] * w[:, i] for i in range(width))
    return z if bias is None else z + bias.to(z.dtype)
