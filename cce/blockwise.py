"""The loss and its gradients in plain PyTorch, block by block: the path of CPU tensors and of float64.

Shapes: N tokens, D hidden, V vocabulary; n and v are a block of tokens and of classes. At most one block of logits,
BLOCK_BYTES large, exists at a time. bf16 and fp16 inputs are widened to fp32 block by block, and everything up to the
returned gradient is fp32 (fp64 for fp64), so the accumulation modes of the presets coincide here.

forward   1 product: logits_nv = e_n c_v^T; per token a running maximum and sum of exp over the classes that are not
          the target, and the target's own logit. The loss is log1p(sum exp(z_v - z_target)): exact for p near 1 too.
backward  3 products: logits again; p - onehot in place of the logits (the target's entry is expm1(-nll), which keeps
          the precision of 1 - p); dC_v = G^T (g e) once per block of classes; dE += G c_v. The upstream gradient g of
          a token scales the rows of e and of dE instead of the block.
"""

from collections.abc import Iterator

import torch

from cce.presets import GradientMode
from cce.targets import IGNORED, OUT_OF_RANGE
from cce.tiles import FILTER_TILE

BLOCK_BYTES = 8 * 2**20
TOKENS = 2048  # at most, in a block


def _block_shape(tokens: int, itemsize: int, tile: tuple[int, int]) -> tuple[int, int]:
    """Tokens and classes of a block: multiples of the filter's tile, so that a tile lies in one block."""
    n = min(max(1, TOKENS // tile[0]), max(1, -(-tokens // tile[0]))) * tile[0]
    return n, max(1, BLOCK_BYTES // (itemsize * max(1, min(n, tokens)) * tile[1])) * tile[1]


def _ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, total)) for start in range(0, total, step))


def _active_tokens(codes_N: torch.Tensor) -> torch.Tensor | None:
    """Indices of the tokens that are not ignored, or None when all are active."""
    active_N = codes_N != IGNORED
    return None if bool(active_N.all()) else active_N.nonzero().squeeze(1)


class _Logits:
    """Makes blocks of logits in one reused buffer."""

    def __init__(self, c_VD, bias_V, softcap, tokens, dtype, tile):
        self.c_VD, self.bias_V, self.softcap, self.dtype = c_VD, bias_V, softcap, dtype
        itemsize = torch.finfo(dtype).bits // 8
        self.n, self.v = _block_shape(tokens, itemsize, tile)
        self.v = min(self.v, c_VD.shape[0])
        self.buffer = torch.empty(min(self.n, tokens) * self.v, dtype=dtype, device=c_VD.device)
        self.widened = None if c_VD.dtype == dtype else c_VD.new_empty(self.v, c_VD.shape[1], dtype=dtype)

    def classes(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start, stop, c_vD in the computing dtype) of each block of classes."""
        for v0, v1 in _ranges(self.c_VD.shape[0], self.v):
            c_vD = self.c_VD[v0:v1]
            if self.widened is not None:
                c_vD = self.widened[: v1 - v0].copy_(c_vD)
            yield v0, v1, c_vD

    def block(self, e_nD: torch.Tensor, c_vD: torch.Tensor, v0: int) -> torch.Tensor:
        """Logits after bias, before the softcap."""
        z_nv = self.buffer[: e_nD.shape[0] * c_vD.shape[0]].view(e_nD.shape[0], c_vD.shape[0])
        torch.mm(e_nD, c_vD.t(), out=z_nv)
        if self.bias_V is not None:
            z_nv += self.bias_V[v0 : v0 + c_vD.shape[0]]
        return z_nv

    def cap_(self, z_nv: torch.Tensor) -> None:
        if self.softcap is not None:
            z_nv.div_(self.softcap).tanh_().mul_(self.softcap)


def _computing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _local_target(codes_n: torch.Tensor, v0: int, v1: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(is the target in [v0, v1), its column there or 0), both [n, 1]."""
    inside_n1 = ((codes_n >= v0) & (codes_n < v1)).unsqueeze(1)
    return inside_n1, torch.where(inside_n1, codes_n.unsqueeze(1).long() - v0, 0)


def _rest_and_target(e_ND, c_VD, bias_V, codes_N, softcap, need_mean, tile):
    dtype = e_ND.dtype
    lowest = torch.finfo(dtype).min  # finite, so that a block of -inf logits subtracts to -inf and not to nan
    maximum_N = torch.full_like(e_ND[:, 0], lowest)
    sum_N, target_N, total_N = (torch.zeros_like(maximum_N) for _ in range(3))
    logits = _Logits(c_VD, bias_V, softcap, e_ND.shape[0], dtype, tile)
    for v0, v1, c_vD in logits.classes():
        for n0, n1 in _ranges(e_ND.shape[0], logits.n):
            z_nv = logits.block(e_ND[n0:n1], c_vD, v0)
            logits.cap_(z_nv)
            if need_mean:
                total_N[n0:n1] += z_nv.sum(1)
            inside_n1, column_n1 = _local_target(codes_N[n0:n1], v0, v1)
            own_n1 = z_nv.gather(1, column_n1)
            z_nv.scatter_(1, column_n1, own_n1.masked_fill(inside_n1, -torch.inf))
            target_N[n0:n1] = torch.where(inside_n1, own_n1, target_N[n0:n1, None]).squeeze(1)
            maximum_n = torch.maximum(maximum_N[n0:n1], z_nv.amax(1))
            sum_N[n0:n1].mul_((maximum_N[n0:n1] - maximum_n).exp_())
            sum_N[n0:n1] += z_nv.sub_(maximum_n[:, None]).exp_().sum(1)
            maximum_N[n0:n1] = maximum_n
    return maximum_N + sum_N.log(), target_N, total_N / c_VD.shape[0]


def forward_parts(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    softcap: float | None,
    need_mean: bool,
    tile: tuple[int, int] = FILTER_TILE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rest, target_logit, mean_logit), each [N] fp32 (fp64 for fp64); 0 for ignored tokens.

    rest is the log-sum-exp over the classes of c that are not the token's target; mean_logit is 0 unless need_mean.
    codes_N: see cce/targets.py.
    """
    active = _active_tokens(codes_N)
    if active is not None:
        parts = forward_parts(e_ND[active], c_VD, bias_V, codes_N[active], softcap, need_mean, tile)
        return tuple(part.new_zeros(codes_N.shape).index_copy_(0, active, part) for part in parts)
    rest_N, target_N, mean_N = _rest_and_target(
        e_ND.to(_computing_dtype(e_ND.dtype)), c_VD, bias_V, codes_N, softcap, need_mean, tile
    )
    return rest_N, target_N.masked_fill_(codes_N == OUT_OF_RANGE, torch.nan), mean_N


def _kept_tiles(y_nv: torch.Tensor, eps: float, tile: tuple[int, int]) -> torch.Tensor:
    """Mask [n, v]: True in the tiles that hold an entry with |y| >= eps."""
    n, v = y_nv.shape
    large_nv = torch.zeros(-n % tile[0] + n, -v % tile[1] + v, dtype=torch.bool, device=y_nv.device)
    large_nv[:n, :v] = y_nv.abs() >= eps
    kept = large_nv.view(-1, tile[0], large_nv.shape[1] // tile[1], tile[1]).any(3).any(1)
    return kept.repeat_interleave(tile[0], 0)[:n].repeat_interleave(tile[1], 1)[:, :v]


def backward_parts(
    e_ND: torch.Tensor,
    c_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    codes_N: torch.Tensor,
    lse_N: torch.Tensor,
    nll_N: torch.Tensor,
    dloss_N: torch.Tensor,
    dlse_N: torch.Tensor | None,
    softcap: float | None,
    label_smoothing: float,
    mode: GradientMode,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    tile: tuple[int, int] = FILTER_TILE,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dE [N, D], dC [V, D], dbias [V] in the computing dtype), None where `needs` says no; dE and dC in `dtypes`.

    lse, nll: the whole vocabulary's log-sum-exp and -log p(target). dloss, dlse: gradients of each token's loss
    (with label smoothing) and lse. The gradient of a logit is, with q the smoothed target distribution,
    ((p - q) dloss + p dlse) softcap'.
    """
    active = _active_tokens(codes_N)
    if active is not None:
        chosen = [None if t is None else t[active] for t in (codes_N, lse_N, nll_N, dloss_N, dlse_N)]
        de_MD, dc_VD, dbias_V = backward_parts(
            e_ND[active], c_VD, bias_V, *chosen, softcap, label_smoothing, mode, needs, dtypes, tile
        )
        de_ND = None if de_MD is None else de_MD.new_zeros(e_ND.shape).index_copy_(0, active, de_MD)
        return de_ND, dc_VD, dbias_V

    (need_e, need_c, need_bias), (N, D), V = needs, e_ND.shape, c_VD.shape[0]
    dtype = _computing_dtype(e_ND.dtype)
    e_ND = e_ND.to(dtype)
    logits = _Logits(c_VD, bias_V, softcap, N, dtype, tile)
    several = logits.n < N  # blocks of tokens: dC adds up over them
    de_ND = torch.zeros(N, D, dtype=dtype, device=e_ND.device) if need_e else None
    dc_VD = torch.empty(V, D, dtype=dtypes[1], device=e_ND.device) if need_c else None
    dbias_V = torch.zeros(V, dtype=dtype, device=e_ND.device) if need_bias else None
    dc_block = torch.empty(logits.v, D, dtype=dtype, device=e_ND.device) if need_c and dtypes[1] != dtype else None
    # A factor per token commutes with both products unless dlse weighs p and the target differently.
    scale_N = dloss_N.to(dtype) if dlse_N is None else None
    scaled_e_ND = e_ND if scale_N is None or not need_c else e_ND * scale_N[:, None]
    uniform = label_smoothing / V
    expm1_N = torch.expm1(-nll_N)

    for v0, v1, c_vD in logits.classes():
        if need_c:
            dc_vD = dc_VD[v0:v1] if dc_block is None else dc_block[: v1 - v0]
            if several or N == 0:
                dc_vD.zero_()
        for n0, n1 in _ranges(N, logits.n):
            z_nv = logits.block(e_ND[n0:n1], c_vD, v0)
            slope_nv = None
            if softcap is not None:
                z_nv.div_(softcap).tanh_()
                slope_nv = 1 - z_nv.square()
                z_nv.mul_(softcap)
            inside_n1, column_n1 = _local_target(codes_N[n0:n1], v0, v1)
            y_nv = z_nv.sub_(lse_N[n0:n1, None]).exp_()
            target_n1 = torch.where(inside_n1, expm1_N[n0:n1, None] + label_smoothing, y_nv.gather(1, column_n1))
            y_nv.scatter_(1, column_n1, target_n1)  # p - (1 - smoothing) onehot
            if uniform:
                y_nv.sub_(uniform)
            kept_nv = None if mode.filter_eps is None else _kept_tiles(y_nv, mode.filter_eps, tile)
            if dlse_N is not None:  # (p - q) dloss + p dlse = (p - q) (dloss + dlse) + q dlse
                y_nv.mul_((dloss_N + dlse_N)[n0:n1, None])
                dlse_n1 = dlse_N[n0:n1, None]
                y_nv.scatter_add_(1, column_n1, torch.where(inside_n1, dlse_n1 * (1 - label_smoothing), 0))
                if uniform:
                    y_nv.add_(dlse_n1, alpha=uniform)
            if slope_nv is not None:
                y_nv.mul_(slope_nv)
            if need_bias:
                dbias_V[v0:v1] += y_nv.sum(0) if scale_N is None else torch.mv(y_nv.t(), scale_N[n0:n1])

            # Products that are not filtered go first, then the dropped tiles become zero in place.
            for filtered in (False, True):
                if filtered and kept_nv is not None:
                    y_nv.mul_(kept_nv)
                if need_e and mode.filter_e == filtered:
                    de_ND[n0:n1].addmm_(y_nv, c_vD)
                if need_c and mode.filter_c == filtered:
                    dc_vD.addmm_(y_nv.t(), scaled_e_ND[n0:n1], beta=float(several))
        if dc_block is not None:
            dc_VD[v0:v1] = dc_block[: v1 - v0]
    if need_e and scale_N is not None:
        de_ND.mul_(scale_N[:, None])
    return None if de_ND is None else de_ND.to(dtypes[0]), dc_VD, dbias_V
