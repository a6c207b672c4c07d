"""Loss and gradients in fp64, by chunks of tokens: what every row of the benchmark is compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 2**30  # of fp64 logits; about three times as much is alive at once
FILTER_EPS = 2.0**-12  # the paper's bound of the gradient filter for bf16
FILTER_TILE = 128  # tokens and classes of a tile on which the filter decides


@dataclass(frozen=True)
class Reference:
    """The answer in fp64, and what the softmax looks like.

    loss: mean of −log p_target in nats. de (N, D), dc (V, D): its gradients.
    median_p_target: median probability of the targets.
    kept_tiles: share of the tiles of FILTER_TILE tokens × FILTER_TILE classes, in their own order, in which some
        |p − onehot| ≥ FILTER_EPS: what a filter of tiles cannot drop.
    de_rounding, dc_rounding: relative error (Frobenius) of the gradients rounded to the inputs' dtype: no result in that
        dtype can be closer.
    """

    loss: float
    de: Tensor
    dc: Tensor
    median_p_target: float
    kept_tiles: float
    de_rounding: float
    dc_rounding: float

    def facts(self) -> dict[str, float]:
        """The numbers without the gradients, for a row."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}


@torch.no_grad()
def reference(e: Tensor, c: Tensor, targets: Tensor) -> Reference:
    """Of e (N, D), c (V, D), targets (N) in [0, V), on their device; no more than CHUNK_BYTES of logits at a time."""
    N, V = len(e), len(c)
    e_ND, c_VD = e.double(), c.double()
    de_ND, dc_VD = torch.empty_like(e_ND), torch.zeros_like(c_VD)
    nll_N = torch.empty(N, dtype=torch.float64, device=e.device)
    chunk = max(1, CHUNK_BYTES // (8 * V * FILTER_TILE)) * FILTER_TILE
    kept, tiles = 0, 0
    for start in range(0, N, chunk):
        here = slice(start, min(start + chunk, N))
        logits_KV = e_ND[here] @ c_VD.T
        target_K1 = targets[here, None]
        target_logit_K1 = logits_KV.gather(1, target_K1)
        nll_K1 = nll(logits_KV, target_logit_K1, target_K1)
        nll_N[here] = nll_K1[:, 0]
        gradient_KV = logits_KV.sub_(target_logit_K1 + nll_K1).exp_()  # p, and 0 at the target
        gradient_KV.scatter_(1, target_K1, torch.expm1(-nll_K1))  # p − 1
        strong_KT = _by_tiles(gradient_KV.abs() >= FILTER_EPS, dim=1)
        strong_TT = _by_tiles(strong_KT, dim=0)
        kept, tiles = kept + int(strong_TT.sum()), tiles + strong_TT.numel()
        gradient_KV /= N
        torch.mm(gradient_KV, c_VD, out=de_ND[here])
        dc_VD.addmm_(gradient_KV.T, e_ND[here])
    return Reference(
        loss=nll_N.mean().item(),
        de=de_ND,
        dc=dc_VD,
        median_p_target=nll_N.neg().exp().median().item(),
        kept_tiles=kept / tiles,
        de_rounding=relative_error(de_ND.to(e.dtype), de_ND),
        dc_rounding=relative_error(dc_VD.to(c.dtype), dc_VD),
    )


def nll(logits_KV: Tensor, target_logit_K1: Tensor, target_K1: Tensor) -> Tensor:
    """-log p_target (K, 1) from logits and the targets' own, whose entries in logits become -inf.

    Without the target's own logit in the sum the nll keeps its relative precision when p → 1.
    """
    rest_K1 = logits_KV.scatter_(1, target_K1, -torch.inf).logsumexp(1, keepdim=True)
    return torch.logaddexp(rest_K1 - target_logit_K1, torch.zeros_like(rest_K1))


def _by_tiles(flags: Tensor, dim: int) -> Tensor:
    """Whether any flag is set in each group of FILTER_TILE along `dim`; the last group may be smaller."""
    size = flags.shape[dim]
    padding = -size % FILTER_TILE
    if padding:
        shape = list(flags.shape)
        shape[dim] = padding
        flags = torch.cat([flags, flags.new_zeros(shape)], dim)
    return flags.unflatten(dim, (-1, FILTER_TILE)).any(dim + 1)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """‖value − truth‖ / ‖truth‖ in the Frobenius norm, in fp64; inf where value is not finite."""
    error = ((value.double() - truth).norm() / truth.norm()).item()
    return error if error == error else float("inf")
