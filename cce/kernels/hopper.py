"""The three kernels over tiles of logits for NVIDIA's Hopper, with specialized warps (Gluon, Triton's lower level).

A program walks many tiles of 128 tokens x 256 classes, one program on a multiprocessor. A producer warp has the tensor memory
accelerator bring the operands, STAGES steps of 64 hidden entries ahead, across tiles. Two groups of four warps consume them,
each for 64 of the tokens: wgmma into fp32 accumulators, the epilogue (cce/kernels/epilogues.py), and stores that nobody waits
for until their buffer is needed again. The groups drift apart by up to STAGES steps, so that the epilogue of one runs beside
the products of the other.

Barriers complete in alternating phases 0 and 1: `full` of a stage when its bytes have come, `empty` when both groups have read
it. Up to KEPT_HIDDEN hidden entries a program keeps its tokens' rows in shared memory for all tiles of an item.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cce.kernels.epilogues import (
    LOWEST,
    add_exponentials,
    halves,
    kept_exponentials,
    logit_gradients,
    starting_reference,
    store_reference,
)
from cce.kernels.launch import Launch
from cce.kernels.logits import grouped
from cce.targets import IGNORED
from cce.tiles import KEPT_HIDDEN, logits_tile

_IGNORED = gl.constexpr(IGNORED)
TOKENS = gl.constexpr(128)
ROWS = gl.constexpr(64)  # tokens of a group of warps
DEPTH = gl.constexpr(64)  # hidden entries of a step
STORED = gl.constexpr(64)  # classes of a block that is stored at a time
GROUP = gl.constexpr(16)


@gluon.constexpr_function
def _logits_layout(classes):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, classes, 16])


@gluon.jit
def _item(item, Codes, N, V, splits, CLASSES: gl.constexpr):
    """(first token, split, first tile of classes, one past the last, whether any token is not ignored)."""
    tile_n, split = grouped(item, gl.cdiv(N, TOKENS), splits, GROUP)
    tiles_v = gl.cdiv(V, CLASSES)
    first = (split * tiles_v) // splits
    last = ((split + 1) * tiles_v) // splits
    n0 = tile_n * TOKENS
    offs_n = n0 + gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    code = gl.load(Codes + offs_n, mask=offs_n < N, other=_IGNORED)
    return n0, split, first, last, gl.max(code, 0) != _IGNORED


@gluon.jit
def _shared(E, C, STEPS: gl.constexpr, KEEP: gl.constexpr):
    """Buffers and barriers: (e tiles, c tiles, full, empty, e's full, e's empty)."""
    STAGES: gl.constexpr = 1024 // C.block_type.shape[0]
    e_tiles = gl.allocate_shared_memory(E.dtype, [2 * (STEPS if KEEP else STAGES), ROWS, DEPTH], E.layout)
    c_tiles = gl.allocate_shared_memory(C.dtype, [STAGES] + C.block_type.shape, C.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    e_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    e_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(e_full, count=1)
    mbarrier.init(e_empty, count=2)
    return e_tiles, c_tiles, full, empty, e_full, e_empty


@gluon.jit
def _produce(
    E,
    C,
    shared,
    Codes,
    N,
    V,
    first_n,
    first_v,
    splits,
    STEPS: gl.constexpr,
    KEEP: gl.constexpr,
    SKIP: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """The operands of every step of every tile of every item, in the order in which they are consumed.

    SKIP: the consumers leave items out whose tokens are all ignored. AHEAD: they begin with a tile before they end the one before,
    also behind an item's last: one more comes, which nobody looks at.
    """
    e_tiles, c_tiles, full, empty, e_full, e_empty = shared
    STAGES: gl.constexpr = c_tiles.type.shape[0]
    CLASSES: gl.constexpr = c_tiles.type.shape[1]
    stage, phase, e_phase = 0, 1, 1  # nothing has been read: the phase before the first counts as complete
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, _, first, last, busy = _item(item, Codes, N, V, splits, CLASSES)
        if SKIP and not busy:
            last = first
        n0 += first_n
        if KEEP:
            if first < last:
                mbarrier.wait(e_empty, e_phase)
                mbarrier.expect(e_full, 2 * STEPS * E.block_type.nbytes)
                for step in gl.static_range(STEPS):
                    tma.async_copy_global_to_shared(E, [n0, step * DEPTH], e_full, e_tiles.index(2 * step))
                    tma.async_copy_global_to_shared(E, [n0 + ROWS, step * DEPTH], e_full, e_tiles.index(2 * step + 1))
                e_phase ^= 1
        if AHEAD:
            last += 1
        for tile_v in range(first, last):
            v0 = first_v + tile_v * CLASSES
            for step in range(STEPS):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                if KEEP:
                    mbarrier.expect(bar, C.block_type.nbytes)
                else:
                    mbarrier.expect(bar, C.block_type.nbytes + 2 * E.block_type.nbytes)
                    tma.async_copy_global_to_shared(E, [n0, step * DEPTH], bar, e_tiles.index(2 * stage))
                    tma.async_copy_global_to_shared(E, [n0 + ROWS, step * DEPTH], bar, e_tiles.index(2 * stage + 1))
                tma.async_copy_global_to_shared(C, [v0, step * DEPTH], bar, c_tiles.index(stage))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def _logits(shared, stage, phase, half: gl.constexpr, STEPS: gl.constexpr, KEEP: gl.constexpr):
    """(e_n . c_v of a group's tokens [ROWS, CLASSES], stage, phase after it)."""
    e_tiles, c_tiles, full, empty, e_full, e_empty = shared
    STAGES: gl.constexpr = c_tiles.type.shape[0]
    CLASSES: gl.constexpr = c_tiles.type.shape[1]
    z = gl.zeros([ROWS, CLASSES], gl.float32, _logits_layout(CLASSES))
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        e_tile = e_tiles.index(2 * (step if KEEP else stage) + half)
        z = warpgroup_mma(e_tile, c_tiles.index(stage).permute((1, 0)), z, use_acc=step > 0, is_async=True)
        z = warpgroup_mma_wait(1, deps=(z,))
        # The stage before is computed: a carried copy of `stage` would be taken for a constant of the loop.
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=step > 0)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    z = warpgroup_mma_wait(0, deps=(z,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES))
    return z, stage, phase


@gluon.jit
def _begin(shared, stage, phase, half: gl.constexpr, STEPS: gl.constexpr):
    """As _logits where tokens are kept, but the products are under way: _end waits for them."""
    e_tiles, c_tiles, full, empty, e_full, e_empty = shared
    STAGES: gl.constexpr = c_tiles.type.shape[0]
    CLASSES: gl.constexpr = c_tiles.type.shape[1]
    z = gl.zeros([ROWS, CLASSES], gl.float32, _logits_layout(CLASSES))
    for step in gl.static_range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        e_tile = e_tiles.index(2 * step + half)
        z = warpgroup_mma(e_tile, c_tiles.index(stage).permute((1, 0)), z, use_acc=step > 0, is_async=True)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return z, stage, phase


@gluon.jit
def _end(shared, z, stage, STEPS: gl.constexpr):
    """z [ROWS, CLASSES]; stage: that after its last step."""
    empty = shared[3]
    STAGES: gl.constexpr = shared[1].type.shape[0]
    z = warpgroup_mma_wait(0, deps=(z,))
    for step in gl.static_range(STEPS):
        mbarrier.arrive(empty.index((stage + STAGES - STEPS + step) % STAGES))
    return z


@gluon.jit
def _tokens_have_come(shared, e_phase, some, KEEP: gl.constexpr):
    """e's phase after an item's tokens have come (some: whether any do)."""
    if KEEP:
        if some:
            mbarrier.wait(shared[4], e_phase)
            e_phase ^= 1
    return e_phase


@gluon.jit
def _tokens_are_read(shared, some, KEEP: gl.constexpr):
    if KEEP:
        mbarrier.arrive(shared[5], pred=some)


@gluon.jit
def _store(Out, out_tiles, x, n0, v0, half: gl.constexpr):
    """Round a group's tile to Out's dtype and write it, two blocks of STORED classes at a time."""
    CLASSES: gl.constexpr = x.shape[1]
    left, right = halves(x, ROWS, CLASSES)
    if CLASSES == 2 * STORED:
        left_tile = out_tiles.index(2 * half)
        right_tile = out_tiles.index(2 * half + 1)
        tma.store_wait(0)
        left_tile.store(left.to(Out.dtype))
        right_tile.store(right.to(Out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(Out, [n0, v0], left_tile)
        tma.async_copy_shared_to_global(Out, [n0, v0 + STORED], right_tile)
    else:
        _store(Out, out_tiles, left, n0, v0, half)
        _store(Out, out_tiles, right, n0, v0 + CLASSES // 2, half)


@gluon.jit
def _sum_consumer(
    shared, Bias, Codes, Target, Part, PartTotal, TileMaxima, N, V, softcap, splits, half: gl.constexpr,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    NEED_TOTAL: gl.constexpr, NEED_MAXIMA: gl.constexpr, MAXIMA_V: gl.constexpr,
):  # fmt: skip
    CLASSES: gl.constexpr = shared[1].type.shape[1]
    of_rows: gl.constexpr = gl.SliceLayout(1, _logits_layout(CLASSES))
    of_columns: gl.constexpr = gl.SliceLayout(0, _logits_layout(CLASSES))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, split, first, last, busy = _item(item, Codes, N, V, splits, CLASSES)
        if not busy:
            last = first
        offs_n = n0 + half * ROWS + gl.arange(0, ROWS, layout=of_rows)
        in_n = offs_n < N
        code = gl.load(Codes + offs_n, mask=in_n, other=_IGNORED)
        reference = gl.full([ROWS], LOWEST, gl.float32, of_rows)
        exp_sum = gl.full([ROWS], 0.0, gl.float32, of_rows)
        total = gl.full([ROWS], 0.0, gl.float32, of_rows)
        e_phase = _tokens_have_come(shared, e_phase, busy, KEEP)
        for tile_v in range(first, last):
            v0 = tile_v * CLASSES
            offs_v = v0 + gl.arange(0, CLASSES, layout=of_columns)
            z, stage, phase = _logits(shared, stage, phase, half, STEPS, KEEP)
            reference, exp_sum, total = add_exponentials(
                z, reference, exp_sum, total, Bias, Target, TileMaxima, code, offs_n, in_n, offs_v, v0, N, V, softcap,
                CLASSES, HAS_BIAS, HAS_SOFTCAP, NEED_TOTAL, NEED_MAXIMA, MAXIMA_V,
            )  # fmt: skip
        _tokens_are_read(shared, busy, KEEP)
        out = split.to(gl.int64) * N + offs_n
        gl.store(Part + out, reference + gl.log2(exp_sum), mask=in_n)
        if NEED_TOTAL:
            gl.store(PartTotal + out, total, mask=in_n)


# cce/kernels/forward.py says what it computes.
@gluon.jit
def _log_sum_exp_kernel(
    E, C, Bias, Codes, Target, Part, PartTotal, TileMaxima, N, V, softcap, splits,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    NEED_TOTAL: gl.constexpr, NEED_MAXIMA: gl.constexpr, MAXIMA_V: gl.constexpr,
):  # fmt: skip
    shared = _shared(E, C, STEPS, KEEP)
    gl.warp_specialize(
        [
            (_sum_consumer, (shared, Bias, Codes, Target, Part, PartTotal, TileMaxima, N, V, softcap, splits, 0, STEPS,
                             KEEP, HAS_BIAS, HAS_SOFTCAP, NEED_TOTAL, NEED_MAXIMA, MAXIMA_V)),
            (_sum_consumer, (shared, Bias, Codes, Target, Part, PartTotal, TileMaxima, N, V, softcap, splits, 1, STEPS,
                             KEEP, HAS_BIAS, HAS_SOFTCAP, NEED_TOTAL, NEED_MAXIMA, MAXIMA_V)),
            (_produce, (E, C, shared, Codes, N, V, 0, 0, splits, STEPS, KEEP, True, False)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _exponentials_consumer(
    shared, out_tiles, W, Bias, Codes, Reference, Target, Part, TileReference, N, V, softcap, splits, half: gl.constexpr,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    CLASSES: gl.constexpr = shared[1].type.shape[1]
    of_rows: gl.constexpr = gl.SliceLayout(1, _logits_layout(CLASSES))
    of_columns: gl.constexpr = gl.SliceLayout(0, _logits_layout(CLASSES))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, split, first, last, _ = _item(item, Codes, N, V, splits, CLASSES)
        offs_n = n0 + half * ROWS + gl.arange(0, ROWS, layout=of_rows)
        in_n = offs_n < N
        code = gl.load(Codes + offs_n, mask=in_n, other=_IGNORED)
        reference = starting_reference(Reference, offs_n, in_n)
        exp_sum = gl.full([ROWS], 0.0, gl.float32, of_rows)
        e_phase = _tokens_have_come(shared, e_phase, True, KEEP)
        if KEEP:
            z, stage, phase = _logits(shared, stage, phase, half, STEPS, KEEP)
        for tile_v in range(first, last):
            v0 = tile_v * CLASSES
            offs_v = v0 + gl.arange(0, CLASSES, layout=of_columns)
            if KEEP:
                following, stage, phase = _begin(shared, stage, phase, half, STEPS)
            else:
                z, stage, phase = _logits(shared, stage, phase, half, STEPS, KEEP)
            w, reference, exp_sum = kept_exponentials(
                z, reference, exp_sum, Bias, Target, TileReference, code, offs_n, in_n, offs_v, tile_v, v0, N, V,
                softcap, CLASSES, HAS_BIAS, HAS_SOFTCAP,
            )  # fmt: skip
            if KEEP:
                z = _end(shared, following, stage, STEPS)
            _store(W, out_tiles, w, n0 + half * ROWS, v0, half)
            store_reference(TileReference, reference, tile_v, offs_n, in_n, N)
        _tokens_are_read(shared, True, KEEP)
        gl.store(Part + split.to(gl.int64) * N + offs_n, reference + gl.log2(exp_sum), mask=in_n)
    tma.store_wait(0)


# cce/kernels/exponentials.py says what it computes.
@gluon.jit
def _exponentials_kernel(
    E, C, W, Bias, Codes, Reference, Target, Part, TileReference, N, V, softcap, splits, first_n,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    Codes += first_n
    Reference += first_n
    Target += first_n
    shared = _shared(E, C, STEPS, KEEP)
    out_tiles = gl.allocate_shared_memory(W.dtype, [4, ROWS, STORED], W.layout)
    gl.warp_specialize(
        [
            (_exponentials_consumer, (shared, out_tiles, W, Bias, Codes, Reference, Target, Part, TileReference, N, V,
                                      softcap, splits, 0, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP)),
            (_exponentials_consumer, (shared, out_tiles, W, Bias, Codes, Reference, Target, Part, TileReference, N, V,
                                      softcap, splits, 1, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP)),
            (_produce, (E, C, shared, Codes, N, V, first_n, 0, splits, STEPS, KEEP, False, KEEP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _gradient_consumer(
    shared, out_tiles, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, first_v, width, softcap, smoothing, uniform, splits,
    half: gl.constexpr, STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_DLSE: gl.constexpr, HAS_SMOOTHING: gl.constexpr,
):  # fmt: skip
    CLASSES: gl.constexpr = shared[1].type.shape[1]
    of_rows: gl.constexpr = gl.SliceLayout(1, _logits_layout(CLASSES))
    of_columns: gl.constexpr = gl.SliceLayout(0, _logits_layout(CLASSES))
    stage, phase, e_phase = 0, 0, 0
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, _, first, last, _ = _item(item, Codes, N, width, splits, CLASSES)
        offs_n = n0 + half * ROWS + gl.arange(0, ROWS, layout=of_rows)
        in_n = offs_n < N
        code = gl.load(Codes + offs_n, mask=in_n, other=_IGNORED)
        e_phase = _tokens_have_come(shared, e_phase, True, KEEP)
        if KEEP:
            z, stage, phase = _logits(shared, stage, phase, half, STEPS, KEEP)
        for tile_v in range(first, last):
            v0 = first_v + tile_v * CLASSES
            offs_v = v0 + gl.arange(0, CLASSES, layout=of_columns)
            if KEEP:
                following, stage, phase = _begin(shared, stage, phase, half, STEPS)
            else:
                z, stage, phase = _logits(shared, stage, phase, half, STEPS, KEEP)
            g = logit_gradients(
                z, Bias, Lse, Expm1, Dloss, Dlse, code, offs_n, in_n, offs_v, v0, V, softcap, smoothing, uniform,
                CLASSES, HAS_BIAS, HAS_SOFTCAP, HAS_DLSE, HAS_SMOOTHING,
            )  # fmt: skip
            if KEEP:
                z = _end(shared, following, stage, STEPS)
            _store(G, out_tiles, g, n0 + half * ROWS, tile_v * CLASSES, half)
        _tokens_are_read(shared, True, KEEP)
    tma.store_wait(0)


# cce/kernels/gradient.py says what it computes.
@gluon.jit
def _logit_gradient_kernel(
    E, C, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, first_v, width, softcap, smoothing, uniform, splits,
    STEPS: gl.constexpr, KEEP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_DLSE: gl.constexpr,
    HAS_SMOOTHING: gl.constexpr,
):  # fmt: skip
    shared = _shared(E, C, STEPS, KEEP)
    out_tiles = gl.allocate_shared_memory(G.dtype, [4, ROWS, STORED], G.layout)
    gl.warp_specialize(
        [
            (_gradient_consumer, (shared, out_tiles, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, first_v, width,
                                  softcap, smoothing, uniform, splits, 0, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP, HAS_DLSE,
                                  HAS_SMOOTHING)),
            (_gradient_consumer, (shared, out_tiles, G, Bias, Codes, Lse, Expm1, Dloss, Dlse, N, V, first_v, width,
                                  softcap, smoothing, uniform, splits, 1, STEPS, KEEP, HAS_BIAS, HAS_SOFTCAP, HAS_DLSE,
                                  HAS_SMOOTHING)),
            (_produce, (E, C, shared, Codes, N, width, 0, first_v, splits, STEPS, KEEP, False, KEEP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


OPERAND = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WARPS = dict(num_warps=4, maxnreg=168)  # of the first group; registers: 65536 over the 12 warps of three warpgroups


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], OPERAND)


def _operands(e_ND: torch.Tensor, c_VD: torch.Tensor, stored: bool) -> tuple[TensorDescriptor, TensorDescriptor]:
    classes = logits_tile(e_ND.dtype, e_ND.shape[1], "hopper", stored).columns
    return _descriptor(e_ND, ROWS.value, DEPTH.value), _descriptor(c_VD, classes, DEPTH.value)


def _walk(tokens: int, e_ND: torch.Tensor, splits: int) -> tuple[tuple[int], dict]:
    """(grid, constants): a program a multiprocessor, or fewer."""
    D, items = e_ND.shape[1], triton.cdiv(tokens, TOKENS.value) * splits
    programs = torch.cuda.get_device_properties(e_ND.device).multi_processor_count
    return (min(items, programs),), dict(STEPS=triton.cdiv(D, DEPTH.value), KEEP=D <= KEPT_HIDDEN)


def log_sum_exp(e_ND: torch.Tensor, c_VD: torch.Tensor, arguments: tuple, flags: dict) -> None:
    """As forward.py's _log_sum_exp_kernel; arguments and flags are its own behind the operands, splits last."""
    grid, walk = _walk(e_ND.shape[0], e_ND, arguments[-1])
    _log_sum_exp_kernel[grid](*_operands(e_ND, c_VD, False), *arguments, **walk, **flags, **WARPS)


def exponentials(e_ND: torch.Tensor, c_VD: torch.Tensor, w_nV: torch.Tensor, arguments: tuple, flags: dict) -> Launch:
    """As exponentials.py's _exponentials_kernel; for w_nV's n tokens."""
    grid, walk = _walk(w_nV.shape[0], e_ND, arguments[-1])
    stored = _descriptor(w_nV, ROWS.value, STORED.value)
    return Launch(
        _exponentials_kernel, grid, (*_operands(e_ND, c_VD, True), stored, *arguments), {**walk, **flags}, **WARPS
    )


def logit_gradient(e_ND: torch.Tensor, c_VD: torch.Tensor, g_Nw: torch.Tensor, arguments: tuple, flags: dict) -> None:
    """As gradient.py's _logit_gradient_kernel, without filter and sums for a bias."""
    grid, walk = _walk(e_ND.shape[0], e_ND, arguments[-1])
    stored = _descriptor(g_Nw, ROWS.value, STORED.value)
    _logit_gradient_kernel[grid](*_operands(e_ND, c_VD, True), stored, *arguments, **walk, **flags, **WARPS)
