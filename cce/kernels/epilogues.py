"""What becomes of a tile of logits while it is in registers: part of a log-sum-exp, exponentials to keep, or its gradient.

Written once for both ways to make the logits: the kernels beside this file (any GPU, and the interpreter) and those of
cce/kernels/hopper. z [BLOCK_N, BLOCK_V] fp32: e_n . c_v, before bias and softcap. offs_n and offs_v: its tokens and classes, in
the layout of z's rows and columns; v0 the first class.
"""

import triton
import triton.language as tl

from cce.targets import IGNORED

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Finite start of a running maximum: a tile of nothing but -inf then adds exp(-inf) = 0 instead of nan.
LOWEST = tl.constexpr(-3.0e38)
# A reference stays until a tile's sum of 2^(z - reference) passes this; the sums then have 2^60 to spare in fp32.
LARGE = tl.constexpr(2.0**60)
# In powers of two: what a logit may lie above its token's reference. Sums over a vocabulary then stay in fp32, and w in bf16.
FAR = tl.constexpr(60.0)
IGNORED_CODE = tl.constexpr(IGNORED)


@triton.jit
def tanh(x):
    """tanh to fp32 precision: its series near 0, where the quotient of exponentials would cancel."""
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    t = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -t, t))


@triton.jit
def with_bias_and_cap(
    z, Bias, offs_v, V, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GAIN: tl.constexpr
):
    """(the logits, what makes powers of two of them). Where there is neither bias nor cap, GAIN is in the latter, at no cost."""
    if HAS_BIAS or HAS_SOFTCAP:
        z *= GAIN
        if HAS_BIAS:
            z += tl.load(Bias + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            z = softcap * tanh(z / softcap)
        log2e: tl.constexpr = LOG2E
    else:
        log2e: tl.constexpr = LOG2E * GAIN
    return z, log2e


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile, in registers."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def rounded_up(x):
    """fp16 that is never below x: what may be dropped is decided by it. The smallest there is for what lies below it, and NaN."""
    return tl.maximum(x + tl.abs(x) * 0.001 + 1e-4, -65504.0).to(tl.float16)


# A sum of 2^(z log2e - reference) per token. The reference is not the running maximum: it moves, to the maximum, only when a
# tile's sum grows LARGE. That is as safe, and an element costs one multiply-add, one exp2 and one add.
# The target's own logit is left out of the sum, so that the loss can be formed as log1p(sum exp(z_v - z_target)). Elements are
# compared with columns only in tiles that hold a target, and in the last: one branch for both, whose barrier keeps the compiler
# from doing its comparisons always.
# NEED_TOTAL: total gets the sum of the logits. NEED_MAXIMA: TileMaxima gets, per token and filter tile, the largest logit that
# is not the target's, rounded up.
@triton.jit
def add_exponentials(
    z, reference, exp_sum, total, Bias, TileMaxima, code, offs_n, in_n, offs_v, v0, N, V, softcap, BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NEED_TOTAL: tl.constexpr, NEED_MAXIMA: tl.constexpr,
    MAXIMA_V: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """(reference, exp_sum, total) [BLOCK_N] with the tile's part."""
    z, log2e = with_bias_and_cap(z, Bias, offs_v, V, softcap, HAS_BIAS, HAS_SOFTCAP, GAIN)
    if NEED_TOTAL:
        total += tl.sum(tl.where((offs_v < V)[None, :], z, 0.0), 1) * (log2e / LOG2E)
    here = (code >= v0) & (code < v0 + BLOCK_V)
    if (tl.max(here.to(tl.int32), 0) != 0) | (v0 + BLOCK_V > V):
        tl.debug_barrier()
        own = offs_v[None, :] == code[:, None]
        z = tl.where(own | (offs_v >= V)[None, :], -float("inf"), z)
    s = tl.sum(tl.exp2(z * log2e - reference[:, None]), 1)
    if tl.max(s, 0) > LARGE:
        moved = tl.maximum(reference, tl.max(z, 1) * log2e)
        exp_sum = exp_sum * tl.exp2(reference - moved)
        s = tl.sum(tl.exp2(z * log2e - moved[:, None]), 1)
        reference = moved
    exp_sum += s
    if NEED_MAXIMA:
        at = TileMaxima + tl.cast(v0 // MAXIMA_V, tl.int64) * N + offs_n
        if BLOCK_V == MAXIMA_V:
            tl.store(at, rounded_up(tl.max(z, 1)), mask=in_n)
        else:
            tl.static_assert(BLOCK_V == 2 * MAXIMA_V)
            left = (offs_v < v0 + MAXIMA_V)[None, :]
            tl.store(at, rounded_up(tl.max(tl.where(left, z, -float("inf")), 1)), mask=in_n)
            at += N
            tl.store(at, rounded_up(tl.max(tl.where(left, -float("inf"), z), 1)), mask=in_n & (v0 + MAXIMA_V < V))
    return reference, exp_sum, total


@triton.jit
def store_reference(TileReference, reference, tile_v, offs_n, in_n, N):
    """Where the reference of a tile's w ended up: TileReference [tiles, n]. After w is stored: a store's fence waits for others."""
    tl.store(TileReference + tl.cast(tile_v, tl.int64) * N + offs_n, reference, mask=in_n)


@triton.jit
def starting_reference(Reference, offs_n, in_n):
    """Of kept_exponentials, from the targets' logits, in powers of two; a target may lie at -inf."""
    return tl.maximum(tl.load(Reference + offs_n, mask=in_n, other=0.0) * LOG2E, LOWEST)


# As add_exponentials, and w = 2^(z log2e - reference) is kept, 0 for the target. The reference of a token starts at its
# target's logit, so it is the same in all tiles unless a logit lies FAR above it: then it moves there. With a softcap w carries
# the cap's slope, the sum does not.
@triton.jit
def logits_to_keep(
    z, reference, exp_sum, Bias, TileReference, code, offs_n, in_n, offs_v, tile_v, v0, N, V, softcap,
    BLOCK_V: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """(what w is made of by exponentials_of [BLOCK_N, BLOCK_V], reference, exp_sum, whether a reference may have moved)."""
    z, log2e = with_bias_and_cap(z, Bias, offs_v, V, softcap, HAS_BIAS, HAS_SOFTCAP, GAIN)
    if v0 + BLOCK_V > V:
        # A store keeps the compiler from making selections of the branch, for every tile.
        store_reference(TileReference, reference, tile_v, offs_n, in_n, N)
        z = tl.where((offs_v < V)[None, :], z, -float("inf"))
    here = (code >= v0) & (code < v0 + BLOCK_V)
    top = tl.max(z, 1) * log2e
    far = top - reference > FAR
    seldom = tl.max((here | far).to(tl.int32), 0) != 0
    if seldom:
        tl.debug_barrier()
        z = tl.where(offs_v[None, :] == code[:, None], -float("inf"), z)
        moved = tl.where(far, top, reference)
        exp_sum *= tl.exp2(reference - moved)
        reference = moved
    return z, reference, exp_sum, seldom


@triton.jit
def exponentials_of(
    z, reference, exp_sum, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GAIN: tl.constexpr
):
    """(w, exp_sum with it) of a tile, or some columns, of logits_to_keep."""
    log2e: tl.constexpr = LOG2E if HAS_BIAS or HAS_SOFTCAP else LOG2E * GAIN
    w = tl.exp2(z * log2e - reference[:, None])
    exp_sum += tl.sum(w, 1)
    if HAS_SOFTCAP:
        t = tl.where(w == 0, 0.0, z / softcap)  # where w is 0, z may be -inf
        w *= 1 - t * t
    return w, exp_sum


@triton.jit
def kept_exponentials(
    z, reference, exp_sum, Bias, TileReference, code, offs_n, in_n, offs_v, tile_v, v0, N, V, softcap,
    BLOCK_V: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """(w [BLOCK_N, BLOCK_V], reference, exp_sum, whether a reference may have moved)."""
    z, reference, exp_sum, seldom = logits_to_keep(
        z, reference, exp_sum, Bias, TileReference, code, offs_n, in_n, offs_v, tile_v, v0, N, V, softcap, BLOCK_V,
        HAS_BIAS, HAS_SOFTCAP, GAIN,
    )  # fmt: skip
    w, exp_sum = exponentials_of(z, reference, exp_sum, softcap, HAS_BIAS, HAS_SOFTCAP, GAIN)
    return w, reference, exp_sum, seldom


@triton.jit
def seldom_in(code, v0, BLOCK_V: tl.constexpr):
    """What a tile of gradients holds: 2 a token that is ignored, 1 a target, 0 neither."""
    here = (code >= v0) & (code < v0 + BLOCK_V)
    return tl.max(tl.where(code != IGNORED_CODE, here.to(tl.int32), 2), 0)


@triton.jit
def upstream_of(Lse, Dloss, Dlse, code, offs_n, in_n, HAS_DLSE: tl.constexpr):
    """(lse in powers of two, dloss, dlse) of tokens."""
    active = code != IGNORED_CODE
    lse2 = tl.load(Lse + offs_n, mask=in_n, other=0.0) * LOG2E
    dloss = tl.load(Dloss + offs_n, mask=active, other=0.0)
    dlse = dloss
    if HAS_DLSE:
        dlse = tl.load(Dlse + offs_n, mask=active, other=0.0)
    return lse2, dloss, dlse


# ((p - q) dloss + p dlse) softcap'; q = (1 - smoothing) onehot + smoothing / V. p = 2^(z log2e - lse log2e) in fp32; the
# target's entry of p - onehot is expm1(-nll) from the forward, so 1 - p keeps its relative precision as p -> 1 and nothing is
# subtracted after rounding.
@triton.jit
def logit_gradients(
    z, seldom, Bias, Expm1, lse2, dloss, dlse, code, offs_n, offs_v, V, softcap, smoothing, uniform,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """G [BLOCK_N, BLOCK_V] fp32; 0 for ignored tokens. seldom: seldom_in of a tile that these classes lie in. lse2, dloss, dlse:
    upstream_of these tokens."""
    active = code != IGNORED_CODE
    z, log2e = with_bias_and_cap(z, Bias, offs_v, V, softcap, HAS_BIAS, HAS_SOFTCAP, GAIN)
    g = tl.exp2(z * log2e - lse2[:, None])
    # What needs to be compared with the target's column is done only where a target lies in the tile, or an ignored token.
    if seldom != 0:
        own = tl.load(Expm1 + offs_n, mask=active, other=0.0) + smoothing
        g = tl.where(offs_v[None, :] == code[:, None], own[:, None], g)
    if HAS_SMOOTHING:
        g -= uniform
    if HAS_DLSE:
        # (p - q) dloss + p dlse = (p - q) (dloss + dlse) + q dlse
        g = g * (dloss + dlse)[:, None]
        g += tl.where(offs_v[None, :] == code[:, None], (dlse * (1 - smoothing))[:, None], 0.0)
        if HAS_SMOOTHING:
            g += (dlse * uniform)[:, None]
    else:
        g = g * dloss[:, None]
    if HAS_SOFTCAP:
        t = z / softcap
        g *= 1 - t * t
    # An ignored token's lse is 0, not its own, and its hidden state may be anything: inf * 0 is nan.
    if seldom == 2:
        tl.debug_barrier()  # keeps the compiler from making selections of the branch, for every tile
        g = tl.where(active[:, None], g, 0.0)
    return g
