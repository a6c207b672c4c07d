"""What the chunked recurrences share: the layout of chunks, and products of rows under a decay that stay finite.

Shape suffixes: B batch, T time, H heads, N chunks, C positions of a chunk, K key dim, V value dim, D any dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 for every half-precision or float32 input, float64 for float64: sums never run in half precision."""
    return torch.promote_types(x.dtype, torch.float32)


def to_chunks(x: Tensor, chunk_size: int, *, hold: bool = False) -> Tensor:
    """(B, T, H, …) → (B, N, H, C, …). The last chunk is filled up with zeros, or with its last row (`hold`)."""
    missing = -x.shape[1] % chunk_size
    if missing:
        last = x[:, -1:] if hold else torch.zeros_like(x[:, -1:])
        x = torch.cat([x, last.expand(-1, missing, *x.shape[2:])], dim=1)
    return x.unflatten(1, (-1, chunk_size)).transpose(2, 3)


def from_chunks(x: Tensor, length: int) -> Tensor:
    """(B, N, H, C, …) → (B, T, H, …): the inverse of `to_chunks`, without what it filled up."""
    return x.transpose(2, 3).flatten(1, 2)[:, :length].contiguous()


def decayed_products(
    left: Tensor, right: Tensor, log_decay: Tensor, exp: Callable[[Tensor], Tensor] = torch.exp
) -> Tensor:
    """The lower triangle of a chunk's products, A_ij = Σ_d left_id · right_jd · exp(g_id − g_jd) for j ≤ i, else 0.

    g is a running sum of log decays, so it falls along C and the exponent is never positive for j ≤ i. The factors
    exp(g_i) and exp(−g_j) apart would under- and overflow; the secondary chunking of GLA (arXiv:2312.06635, section 4)
    splits the sum at a row m between j and i, exp(g_i − g_m) · exp(g_m − g_j), with both exponents ≤ 0. Here it is
    carried through: the triangle of 2h rows is two triangles of h rows and one square, whose m is the last early row.

    Args:
        left, right, log_decay: (…, C, D), C a power of two; `left` may have one more leading axis.
        exp: torch.exp, or torch.exp2 for decays in units of log 2 (FLA's kernels use those).

    Returns:
        (…, C, C).
    """
    size = log_decay.shape[-2]
    triangles = (left * right).sum(-1)[..., None, None]  # (…, C, 1, 1): the diagonal
    half = 1
    while half < size:
        (g_early, g_late), (_, left_late), (right_early, _) = (
            x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (log_decay, left, right)
        )
        g_middle = g_early[..., -1:, :]
        square = (left_late * exp(g_late - g_middle)) @ (right_early * exp(g_middle - g_early)).mT
        early, late = triangles.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([early, torch.zeros_like(square)], dim=-1)
        triangles = torch.cat([upper, torch.cat([square, late], dim=-1)], dim=-2)
        half *= 2
    return triangles.squeeze(-3)
