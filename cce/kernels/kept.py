"""Exponentials of a chunk of tokens, kept in memory, and per token what makes gradients of them (cce/kernels/chunked.py)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cce.kernels.epilogues import (
    IGNORED_CODE,
    LN2,
    LOG2E,
    LOWEST,
    kept_exponentials,
    starting_reference,
    store_reference,
)
from cce.kernels.launch import Launch
from cce.kernels.logits import (
    descriptor,
    grouped,
    part_of,
    precision,
    raw_logits,
    store_tile,
    stored_columns,
)
from cce.kernels.problem import Problem
from cce.tiles import architecture, gain, logits_tile


class Kept(NamedTuple):
    """w [n, V] bf16 in two places: its first columns, and those behind them (None: there are none)."""

    left: torch.Tensor
    right: torch.Tensor | None

    def rows(self, n: int) -> "Kept":
        return Kept(self.left[:n], None if self.right is None else self.right[:n])

    def parts(self) -> list[tuple[slice, torch.Tensor]]:
        """(classes, w of these)."""
        L = self.left.shape[1]
        of_left = (slice(0, L), self.left)
        return [of_left] if self.right is None else [of_left, (slice(L, L + self.right.shape[1]), self.right)]


# As the log-sum-exp kernel, and each tile's w is stored: kept_exponentials. For N tokens from the first_n-th on; Left, Right,
# Part and TileReference begin with these. Left has the classes below left_V, a multiple of BLOCK_V where there are more, in Right.
@triton.jit
def _exponentials_kernel(
    E, C, Left, Right, Bias, Codes, Reference, Part, TileReference, N, V, left_V, softcap, splits, first_n,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    Codes += first_n
    Reference += first_n
    tile_n, split = grouped(tl.program_id(0), tl.cdiv(N, BLOCK_N), splits, GROUP)
    n0 = tile_n * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    code = tl.load(Codes + offs_n, mask=in_n, other=IGNORED_CODE)
    reference = starting_reference(Reference, offs_n, in_n)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    first, last = part_of(split, tl.cdiv(V, BLOCK_V), splits)
    for tile_v in tl.range(first, last):
        v0 = tile_v * BLOCK_V
        z = raw_logits(E, C, first_n + n0, v0, D, BLOCK_N, BLOCK_V, BLOCK_D, PRECISION)
        w, reference, exp_sum, seldom = kept_exponentials(
            z, reference, exp_sum, Bias, TileReference, code, offs_n, in_n, v0 + tl.arange(0, BLOCK_V), tile_v, v0, N, V,
            softcap, BLOCK_V, HAS_BIAS, HAS_SOFTCAP, GAIN,
        )  # fmt: skip
        if v0 < left_V:
            store_tile(Left, w, n0, v0, BLOCK_N, BLOCK_V)
        else:
            store_tile(Right, w, n0, v0 - left_V, BLOCK_N, BLOCK_V)
        store_reference(TileReference, reference, tile_v, offs_n, in_n, N)
    tl.store(Part + tl.cast(split, tl.int64) * N + offs_n, reference + tl.log2(exp_sum), mask=in_n)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0 to fp32 precision: log2 of a number next to 1 has none, the series 2 atanh(x / (2 + x)) does."""
    s = x / (2 + x)
    s2 = s * s
    series = 2 * s * (1 + s2 * (1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * (1 / 9 + s2 * (1 / 11))))))
    return tl.where(x < 0.5, series, tl.log2(1 + x) * LN2)


PARTS_AT_ONCE = tl.constexpr(4)  # of dE: what a warp has in flight


# Per token: rest from the splits' parts, nll = log(1 + exp(rest - target)), lse = log(exp(rest) + exp(target)), and the two
# numbers that make gradients of the stored w (in units of 2^-reference, the largest of the token's references):
#   scale = (dloss + dlse) 2^(reference - lse log2e)     the gradient of a logit that is not the target's is scale w
#   own   = ((p - 1) dloss + p dlse) slope               that of the target's; p - 1 = -x / (1 + x), x = exp(rest - target)
# with dlse = 2 z_loss lse dloss, the gradient of z_loss lse^2. NEED_SCALED: ScaledE = round(scale e).
# For N tokens from the first_n-th on; Part, TileReference, w (Left and Right), ScaledE and X begin with these.
# Tiles whose reference stayed behind the token's largest are brought to it: as a rule there are none.
# STREAMED: w was not kept, and a tile of TileReference is a split. If NEED_DE, X has the splits' w C, and DE = round(scale (w C) +
# own c_target). For gradients of logits that are made again Scale is then lse log2e - log2 |1 + 2 z_loss lse|, infinite for ignored
# tokens, and Own is stored without dloss: rounding to bf16 then costs a target's entry next to nothing where p is small.
@triton.jit
def _tokens_kernel(
    Part, TileReference, Target, Codes, Dloss, Nll, Lse, Scale, Own, Left, Right, E, ScaledE, X, C, DE,
    N, V, left_V, D, stride_left, stride_right, stride_e, stride_s, stride_c, stride_de, splits, tiles_v, z_loss, softcap,
    first_n,
    HAS_SOFTCAP: tl.constexpr, STREAMED: tl.constexpr, NEED_SCALED: tl.constexpr, NEED_DE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    Target += first_n
    Codes += first_n
    Nll += first_n
    Lse += first_n
    Scale += first_n
    Own += first_n
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < N
    maximum = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    reference = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    lowest = tl.full((BLOCK_N,), -LOWEST, dtype=tl.float32)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split_0 in range(0, splits, BLOCK_S):
        split = split_0 + tl.arange(0, BLOCK_S)[:, None]
        mask = (split < splits) & inside[None, :]
        part = tl.load(Part + split.to(tl.int64) * N + offs_n[None, :], mask=mask, other=LOWEST)
        moved = tl.maximum(maximum, tl.max(part, 0))
        exp_sum = exp_sum * tl.exp2(maximum - moved) + tl.sum(tl.exp2(part - moved[None, :]), 0)
        maximum = moved
        # Within a split references only rise: its first tile has the smallest, its last the largest.
        first, stop = part_of(split, tiles_v, splits)
        at_first = TileReference + first.to(tl.int64) * N + offs_n[None, :]
        at_last = TileReference + (stop - 1).to(tl.int64) * N + offs_n[None, :]
        reference = tl.maximum(reference, tl.max(tl.load(at_last, mask=mask, other=LOWEST), 0))
        lowest = tl.minimum(lowest, tl.min(tl.load(at_first, mask=mask, other=-LOWEST), 0))
    target = tl.load(Target + offs_n, mask=inside, other=0.0)
    code = tl.load(Codes + offs_n, mask=inside, other=IGNORED_CODE)
    active = code != IGNORED_CODE
    rest = (maximum + tl.log2(exp_sum)) * LN2
    gap = rest - target
    x = tl.exp(-tl.abs(gap))
    nll = tl.maximum(gap, 0.0) + log1p(x)
    lse = tl.maximum(rest, target) + log1p(x)
    p = tl.where(gap > 0, x, 1.0) / (1 + x)
    minus_rest = -tl.where(gap > 0, 1.0, x) / (1 + x)
    dloss = tl.load(Dloss)
    of_lse = 2 * z_loss * lse  # dlse / dloss
    own = minus_rest + p * of_lse
    if HAS_SOFTCAP:
        t = target / softcap
        own *= 1 - t * t
    own = tl.where(active, own, 0.0)
    scale = tl.where(active, dloss * (1 + of_lse) * tl.exp2(reference - lse * LOG2E), 0.0)
    tl.store(Nll + offs_n, tl.where(active, nll, 0.0), mask=inside)
    tl.store(Lse + offs_n, tl.where(active, lse, 0.0), mask=inside)
    if STREAMED:
        shift = lse * LOG2E - tl.log2(tl.abs(1 + of_lse))
        tl.store(Scale + offs_n, tl.where(active, shift, float("inf")), mask=inside)
        tl.store(Own + offs_n, own, mask=inside)
    own = tl.where(active, own * dloss, 0.0)
    if not STREAMED:
        tl.store(Scale + offs_n, scale, mask=inside)
        tl.store(Own + offs_n, own, mask=inside)
    rows = offs_n.to(tl.int64)[:, None]
    if NEED_SCALED:
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)[None, :]
            mask = inside[:, None] & (offs_d < D)
            e = tl.load(E + (first_n + rows) * stride_e + offs_d, mask=mask, other=0.0).to(tl.float32) * scale[:, None]
            tl.store(ScaledE + rows * stride_s + offs_d, e.to(ScaledE.dtype.element_ty), mask=mask)
    if NEED_DE:
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)[None, :]
            mask = inside[:, None] & (offs_d < D)
            product = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
            for split_0 in range(0, splits, PARTS_AT_ONCE):
                split = (split_0 + tl.arange(0, PARTS_AT_ONCE)).to(tl.int64)[:, None]
                in_s = (split < splits) & inside[None, :]
                of_split = tl.load(TileReference + split * N + offs_n[None, :], mask=in_s, other=LOWEST)
                at = X + (split[:, :, None] * N + rows[None, :, :]) * D + offs_d[None, :, :]
                of_part = tl.load(at, mask=in_s[:, :, None] & mask[None, :, :], other=0.0)
                product += tl.sum(of_part * tl.exp2(of_split - reference[None, :])[:, :, None], 0)
            at = C + tl.maximum(code, 0).to(tl.int64)[:, None] * stride_c + offs_d
            of_target = tl.load(at, mask=mask & (code >= 0)[:, None], other=0.0).to(tl.float32)
            de = product * scale[:, None] + of_target * own[:, None]
            tl.store(DE + (first_n + rows) * stride_de + offs_d, de.to(DE.dtype.element_ty), mask=mask)
    if not STREAMED:
        if tl.max((inside & (lowest < reference)).to(tl.int32), 0) != 0:
            for tile_v in range(0, tiles_v):
                at = TileReference + tl.cast(tile_v, tl.int64) * N + offs_n
                behind = tl.load(at, mask=inside, other=0.0) - reference
                if tl.min(tl.where(inside, behind, 0.0), 0) < 0:
                    offs_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
                    mask = inside[:, None] & (offs_v < V)[None, :]
                    W = Left + rows * stride_left
                    if tile_v * BLOCK_V >= left_V:
                        W = Right + rows * stride_right - left_V
                    w = tl.load(W + offs_v[None, :], mask=mask, other=0.0).to(tl.float32) * tl.exp2(behind)[:, None]
                    tl.store(W + offs_v[None, :], w.to(Left.dtype.element_ty), mask=mask)


def exponentials(
    problem: Problem,
    target_N: torch.Tensor,
    w: Kept,
    scaled_e: torch.Tensor | None,
    parts: torch.Tensor,
    tile_references: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[Launch, Launch]:
    """Two kernels to launch one after the other, with the first token of a chunk: they fill w, but for the targets'
    entries, which are 0, scaled_e [n, D] and the chunk's part of tokens = (nll, lse, scale, own), each [N] fp32, of _tokens_kernel.

    w: in two places the left one has whole tiles of classes. target_N: of target_logit.py, where references start. parts [splits, n]
    and tile_references [tiles of classes, n]: fp32 scratch.
    """
    e_ND, c_VD, bias_V, codes_N, dloss, softcap, z_loss = problem
    (left, right), n, V = w, w.left.shape[0], c_VD.shape[0]
    right = left if right is None else right  # never written to
    D, arch = e_ND.shape[1], architecture(e_ND.device, e_ND.dtype)
    tile = logits_tile(e_ND.dtype, D, arch, stored=True)
    splits, tiles_v = parts.shape[0], triton.cdiv(V, tile.columns)
    arguments = (
        bias_V, codes_N, target_N, parts, tile_references, n, V, left.shape[1], softcap or 1.0, splits,
    )  # fmt: skip
    flags = dict(HAS_BIAS=bias_V is not None, HAS_SOFTCAP=softcap is not None)
    if arch == "hopper":
        from cce.kernels import hopper

        of_classes = hopper.exponentials(e_ND, c_VD, left, right, tile, arguments, flags)
    else:
        of_classes = Launch(
            _exponentials_kernel,
            (triton.cdiv(n, tile.rows) * splits,),
            (
                descriptor(e_ND, tile.rows, tile.depth), descriptor(c_VD, tile.columns, tile.depth),
                *(descriptor(place, tile.rows, stored_columns(tile.columns)) for place in (left, right)), *arguments,
            ),
            dict(
                D=D, BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_D=tile.depth, GROUP=tile.group, **flags,
                GAIN=gain(D, e_ND.device, e_ND.dtype), PRECISION=precision(e_ND.dtype),
            ),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    block = 8
    of_tokens = Launch(
        _tokens_kernel,
        (triton.cdiv(n, block),),
        (
            parts, tile_references, target_N, codes_N, dloss, *tokens, left, right, e_ND, scaled_e, None, None, None, n,
            V, left.shape[1], D, left.stride(0), right.stride(0), e_ND.stride(0),
            0 if scaled_e is None else scaled_e.stride(0), 0, 0, splits, tiles_v, z_loss, softcap or 1.0,
        ),
        dict(
            HAS_SOFTCAP=softcap is not None, STREAMED=False, NEED_SCALED=scaled_e is not None, NEED_DE=False,
            BLOCK_N=block, BLOCK_S=32, BLOCK_V=tile.columns, BLOCK_D=min(256, triton.next_power_of_2(D)),
        ),
        num_warps=1,
    )  # fmt: skip
    return of_classes, of_tokens


def streamed_tokens(
    problem: Problem,
    target_N: torch.Tensor,
    x_snD: torch.Tensor,
    parts: torch.Tensor,
    references: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    de_ND: torch.Tensor | None,
) -> Launch:
    """launch(first): as the second kernel of `exponentials`, behind a kernel that kept no exponentials but their product with c,
    x_snD [splits, n, D] fp32 contiguous, in units of 2^-references [splits, n].

    It fills the chunk's part of tokens = (nll, lse, shift, own), each [N] fp32, and of de_ND. shift = lse log2e - log2 |1 + 2 z_loss
    lse|, infinite for ignored tokens; own is without dloss.
    """
    _, c_VD, _, codes_N, dloss, softcap, z_loss = problem
    splits, n, D = x_snD.shape
    block, need_de = 2, de_ND is not None
    return Launch(
        _tokens_kernel,
        (triton.cdiv(n, block),),
        (
            parts, references, target_N, codes_N, dloss, *tokens, None, None, None, None, x_snD, c_VD, de_ND, n,
            c_VD.shape[0], 0, D, 0, 0, 0, 0, c_VD.stride(0), de_ND.stride(0) if need_de else 0, splits, splits, z_loss,
            softcap or 1.0,
        ),
        dict(
            HAS_SOFTCAP=softcap is not None, STREAMED=True, NEED_SCALED=False, NEED_DE=need_de, BLOCK_N=block,
            BLOCK_S=32, BLOCK_V=1, BLOCK_D=min(256, triton.next_power_of_2(D)),
        ),
        num_warps=1,
    )  # fmt: skip
