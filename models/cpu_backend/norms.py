"""LayerNorm and RMSNorm on the CPU, plain and with an output gate: forward and closed-form backward.

x̂ = (x − mean) · rstd (RMSNorm: mean = 0), rstd = 1/√(variance + eps), y = x̂ · w + b, and with a gate y · act(g).
Signatures and results are those of fla.modules.norm.layernorm and fused_norm_gate; rows are (T, D).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.cpu_backend.chunks import compute_dtype


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
):
    """Returns y, mean (None for RMSNorm), rstd, and x + residual, which the backward pass and a prenorm block need."""
    summed, kept = add_residual(x, residual, residual_dtype)
    mean, rstd = statistics(summed, eps, is_rms_norm)
    y = affine(normalized(summed, mean, rstd), weight, bias, num_groups)
    return y.to(out_dtype or x.dtype), mean, rstd, kept


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dres: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
):
    """Returns dx, dweight, dbias, dresidual (None without a residual), and y again if `recompute_output`."""
    x_hat = normalized(x.to(compute_dtype(x)), mean, rstd)
    results = norm_gradients(
        dy.to(x_hat.dtype), x, x_hat, weight, bias, mean, rstd, dres, has_residual, x_dtype, num_groups
    )
    return (*results, affine(x_hat, weight, bias, num_groups).to(dy.dtype)) if recompute_output else results


def layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
):
    """As layer_norm_fwd, with y · act(g)."""
    summed, kept = add_residual(x, residual, residual_dtype)
    mean, rstd = statistics(summed, eps, is_rms_norm)
    gate, _ = gate_and_slope(g.to(summed.dtype), activation)
    y = affine(normalized(summed, mean, rstd), weight, bias) * gate
    return y.to(out_dtype or x.dtype), mean, rstd, kept


def layer_norm_gated_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
):
    """As layer_norm_bwd, with dg in the second place."""
    x_hat = normalized(x.to(compute_dtype(x)), mean, rstd)
    dy = dy.to(x_hat.dtype)
    gate, slope = gate_and_slope(g.to(x_hat.dtype), activation)
    y = affine(x_hat, weight, bias)
    dg = (dy * y * slope).to(x_dtype or g.dtype)
    dx, dw, db, dres = norm_gradients(dy * gate, x, x_hat, weight, bias, mean, rstd, dresidual, has_residual, x_dtype)
    results = (dx, dg, dw, db, dres)
    return (*results, (y * gate).to(dy.dtype)) if recompute_output else results


def add_residual(x: Tensor, residual: Tensor | None, residual_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """x + residual in the compute dtype, and the same in the dtype that the residual stream keeps."""
    summed = x.to(compute_dtype(x))
    if residual is not None:
        summed = summed + residual.to(summed.dtype)
        return summed, summed.to(residual.dtype)
    return summed, x if residual_dtype in (None, x.dtype) else x.to(residual_dtype)


def statistics(x: Tensor, eps: float, is_rms_norm: bool) -> tuple[Tensor | None, Tensor]:
    if is_rms_norm:
        return None, (x.square().mean(-1) + eps).rsqrt()
    variance, mean = torch.var_mean(x, dim=-1, correction=0)
    return mean, (variance + eps).rsqrt()


def normalized(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return (x if mean is None else x - mean[:, None]) * rstd[:, None]


def by_group(x: Tensor, num_groups: int) -> Tensor:
    """(T, D) rows → (T / G, G, D): row t belongs to group t mod G, which has its own weight and bias."""
    return x.unflatten(0, (-1, num_groups))


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int = 1) -> Tensor:
    y = by_group(x_hat, num_groups)
    if weight is not None:
        y = y * weight.to(y.dtype).view(num_groups, -1)
    if bias is not None:
        y = y + bias.to(y.dtype).view(num_groups, -1)
    return y.flatten(0, 1)


def norm_gradients(dy, x, x_hat, weight, bias, mean, rstd, dres, has_residual, x_dtype, num_groups: int = 1):
    """dx = rstd · (d − mean(d)[LayerNorm only] − x̂ · mean(d · x̂)) + dres with d = dy · w, the mean over a row."""
    d_hat = affine(dy, weight, None, num_groups)
    dx = d_hat - x_hat * (d_hat * x_hat).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - d_hat.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    if dres is not None:
        dx = dx + dres.to(dx.dtype)
    dw = None if weight is None else by_group(dy * x_hat, num_groups).sum(0).to(weight.dtype).view_as(weight)
    db = None if bias is None else by_group(dy, num_groups).sum(0).to(bias.dtype).view_as(bias)
    return dx.to(x_dtype or x.dtype), dw, db, dx.to(x.dtype) if has_residual else None


def gate_and_slope(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(g) and act'(g) for 'swish' (or 'silu') and 'sigmoid'."""
    s = torch.sigmoid(g)
    if activation == "sigmoid":
        return s, s * (1 - s)
    if activation in ("swish", "silu"):
        return F.silu(g), s * (1 + g * (1 - s))
    raise ValueError(f"the output gate's activation is {activation!r}: take 'swish', 'silu' or 'sigmoid'")
