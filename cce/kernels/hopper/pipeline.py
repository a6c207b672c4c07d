"""Tiles of logits by specialized warps: one warp asks for the operands, two groups of four make products of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cce.kernels.epilogues import IGNORED_CODE, halves
from cce.kernels.logits import grouped, part_of
from cce.tiles import HOPPER_TILE, sum_gain

TOKENS = gl.constexpr(HOPPER_TILE.rows)
ROWS = gl.constexpr(HOPPER_TILE.rows // 2)  # tokens of a group of warps
DEPTH = gl.constexpr(HOPPER_TILE.depth)  # hidden entries of a step
GROUP = gl.constexpr(HOPPER_TILE.group)
BLOCK = gl.constexpr(128)  # classes of a block that is stored at a time
GAIN_OF_STEP = gl.constexpr(sum_gain(HOPPER_TILE.depth) - 1)


@gluon.constexpr_function
def logits_layout(classes):
    """How a tile of logits lies in the registers of a group of warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, classes, 16])


@gluon.constexpr_function
def gain(steps):
    """cce/tiles.py: sum_gain."""
    return 1.0 + steps * GAIN_OF_STEP


@gluon.jit
def part_at(item, N, V, splits, CLASSES: gl.constexpr):
    """(first token, split, first tile of classes, one past the last)."""
    tile_n, split = grouped(item, gl.cdiv(N, TOKENS), splits, GROUP)
    first, last = part_of(split, gl.cdiv(V, CLASSES), splits)
    return tile_n * TOKENS, split, first, last


@gluon.jit
def item_at(item, Codes, N, V, splits, CLASSES: gl.constexpr):
    """As part_at, and whether any token is not ignored."""
    n0, split, first, last = part_at(item, N, V, splits, CLASSES)
    offs_n = n0 + gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    code = gl.load(Codes + offs_n, mask=offs_n < N, other=IGNORED_CODE)
    return n0, split, first, last, gl.max(code, 0) != IGNORED_CODE


@gluon.jit
def rows_of(n0, Codes, N, half: gl.constexpr, CLASSES: gl.constexpr):
    """(offsets of a group's tokens, which of them are below N, their codes), in the layout of the rows of its logits."""
    offs_n = n0 + half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, logits_layout(CLASSES)))
    in_n = offs_n < N
    return offs_n, in_n, gl.load(Codes + offs_n, mask=in_n, other=IGNORED_CODE)


@gluon.jit
def shared_memory(E, C, STEPS: gl.constexpr, KEEP: gl.constexpr):
    """Buffers and barriers: (e tiles, c tiles, full, empty, e's full, e's empty)."""
    STAGES: gl.constexpr = 1024 // C.block_type.shape[0]  # as many as 128 KiB of c hold
    e_tiles = gl.allocate_shared_memory(E.dtype, [2 * (STEPS if KEEP else STAGES), ROWS, DEPTH], E.layout)
    c_tiles = gl.allocate_shared_memory(C.dtype, [STAGES] + C.block_type.shape, C.layout)
    full, empty = barriers(STAGES)
    if KEEP:
        e_full, e_empty = item_barriers()
    else:
        # Nothing waits for them. Barriers that nothing uses would share their words with a buffer.
        e_full, e_empty = full.index(0), empty.index(0)
    return e_tiles, c_tiles, full, empty, e_full, e_empty


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """(full, empty) of each stage."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return full, empty


@gluon.jit
def item_barriers():
    """(full, empty) of what stays for an item."""
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=2)
    return full, empty


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """(stage, phase) of the step after: the phase turns where the stages begin again."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def produce(
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

    SKIP: the consumers take nothing for items whose tokens are all ignored. AHEAD: they begin with a tile before they end the one
    before, also behind an item's last: one more comes, which nobody looks at.
    """
    e_tiles, c_tiles, full, empty, e_full, e_empty = shared
    STAGES: gl.constexpr = c_tiles.type.shape[0]
    CLASSES: gl.constexpr = c_tiles.type.shape[1]
    stage, phase, e_phase = 0, 1, 1  # nothing has been read: the phase before the first counts as complete
    for item in range(gl.program_id(0), gl.cdiv(N, TOKENS) * splits, gl.num_programs(0)):
        n0, _, first, last, busy = item_at(item, Codes, N, V, splits, CLASSES)
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
        if AHEAD and first < last:
            last += 1
        for tile_v in range(first, last):
            v0 = first_v + tile_v * CLASSES
            for step in range(STEPS):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                d0 = step * DEPTH
                if KEEP:
                    mbarrier.expect(bar, C.block_type.nbytes)
                else:
                    if tile_v % 2 == 1:  # backward: gain
                        d0 = (STEPS - 1) * DEPTH - d0
                    mbarrier.expect(bar, C.block_type.nbytes + 2 * E.block_type.nbytes)
                    tma.async_copy_global_to_shared(E, [n0, d0], bar, e_tiles.index(2 * stage))
                    tma.async_copy_global_to_shared(E, [n0 + ROWS, d0], bar, e_tiles.index(2 * stage + 1))
                tma.async_copy_global_to_shared(C, [v0, d0], bar, c_tiles.index(stage))
                stage, phase = after(stage, phase, STAGES)


@gluon.jit
def logits(shared, stage, phase, half: gl.constexpr, STEPS: gl.constexpr, KEEP: gl.constexpr):
    """(e_n . c_v of a group's tokens [ROWS, CLASSES], stage, phase after it)."""
    e_tiles, c_tiles, full, empty, e_full, e_empty = shared
    STAGES: gl.constexpr = c_tiles.type.shape[0]
    CLASSES: gl.constexpr = c_tiles.type.shape[1]
    z = gl.zeros([ROWS, CLASSES], gl.float32, logits_layout(CLASSES))
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        e_tile = e_tiles.index(2 * (step if KEEP else stage) + half)
        z = warpgroup_mma(e_tile, c_tiles.index(stage).permute((1, 0)), z, use_acc=step > 0, is_async=True)
        z = warpgroup_mma_wait(1, deps=(z,))
        # The stage before is computed: a carried copy of `stage` would be taken for a constant of the loop.
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=step > 0)
        stage, phase = after(stage, phase, STAGES)
    z = warpgroup_mma_wait(0, deps=(z,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES))
    return z, stage, phase


@gluon.jit
def begin_logits(shared, stage, phase, half: gl.constexpr, STEPS: gl.constexpr):
    """As `logits` where tokens are kept, but the products are under way: end_logits waits for them."""
    e_tiles, c_tiles, full, empty, e_full, e_empty = shared
    STAGES: gl.constexpr = c_tiles.type.shape[0]
    CLASSES: gl.constexpr = c_tiles.type.shape[1]
    z = gl.zeros([ROWS, CLASSES], gl.float32, logits_layout(CLASSES))
    for step in gl.static_range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        e_tile = e_tiles.index(2 * step + half)
        z = warpgroup_mma(e_tile, c_tiles.index(stage).permute((1, 0)), z, use_acc=step > 0, is_async=True)
        stage, phase = after(stage, phase, STAGES)
    return z, stage, phase


@gluon.jit
def end_logits(shared, z, stage, STEPS: gl.constexpr):
    """z [ROWS, CLASSES]; stage: that after its last step."""
    empty = shared[3]
    STAGES: gl.constexpr = shared[1].type.shape[0]
    z = warpgroup_mma_wait(0, deps=(z,))
    for step in gl.static_range(STEPS):
        mbarrier.arrive(empty.index((stage + STAGES - STEPS + step) % STAGES))
    return z


@gluon.jit
def tokens_have_come(shared, e_phase, some, KEEP: gl.constexpr):
    """e's phase after an item's tokens have come (some: whether any do)."""
    if KEEP:
        if some:
            mbarrier.wait(shared[4], e_phase)
            e_phase ^= 1
    return e_phase


@gluon.jit
def tokens_are_read(shared, some, KEEP: gl.constexpr):
    if KEEP:
        mbarrier.arrive(shared[5], pred=some)


@gluon.jit
def store_rounded(Out, out_tiles, x, n0, v0, half: gl.constexpr):
    """Round a group's block to Out's dtype and write it, once the block before is out of shared memory."""
    tile = out_tiles.index(half)
    tma.store_wait(0)
    tile.store(x.to(Out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(Out, [n0, v0], tile)


# A wide tile is worked on by blocks: while one is on its way out of shared memory the numbers of the next are made.
@gluon.jit
def blocks(z):
    """The left and the right BLOCK of a tile of logits, in a block's layout: the registers that they are in."""
    left, right = halves(z, ROWS, 2 * BLOCK)
    of_block: gl.constexpr = logits_layout(BLOCK)
    return (
        gl.convert_layout(left, of_block, assert_trivial=True),
        gl.convert_layout(right, of_block, assert_trivial=True),
    )


@gluon.jit
def of_rows(x, CLASSES: gl.constexpr):
    """A number per token, in the layout of the rows of a tile of CLASSES: the registers that it is in."""
    return gl.convert_layout(x, gl.SliceLayout(1, logits_layout(CLASSES)), assert_trivial=True)
