"""Which of the two ways to walk the gradient takes, from the shape and the memory that it may use.

slices     backward pass: slices of the vocabulary, logits made again: 4 products; dE adds up over slices.
one pass   forward pass: chunks of tokens, exponentials kept: 3 products; dC adds up over chunks. Needs the upstream gradient
           to be one number, which can be multiplied in later.

N tokens, D hidden, V vocabulary. Workspace: bytes beyond inputs and gradients.
"""

import functools
import math
from collections.abc import Iterator

import torch

from cce.presets import Accumulation
from cce.tiles import (
    DEFAULT_SLICE_CLASSES,
    DEFAULT_SLICE_MIB,
    FILTER_TILE,
    KAHAN_BLOCK_BYTES,
    MIB,
    MULTIPROCESSORS,
    Architecture,
    logits_tile,
    multiplies,
    padded_width,
    vocabulary_splits,
)

# Rates that the two ways are compared at, an H200's: products in FLOP/s, memory in bytes/s. On another GPU the choice is a guess.
PRODUCT_RATE = 650e12
MEMORY_RATE = 4e12

# Bytes per element of dE or dC: what an accumulation takes beside a gradient in bf16, and what it reads and writes each time.
ACCUMULATION_BYTES: dict[Accumulation, int] = {"fp32": 4, "kahan": 2, "plain": 0}
TRAFFIC: dict[Accumulation, int] = {"fp32": 8, "kahan": 8, "plain": 4}


def mib_of_sum(rows: int, hidden: int, accumulation: Accumulation) -> float:
    """What a sum in bf16 takes beside itself: its fp32 copy, or rounding errors and the block that products go through."""
    return (rows * hidden * ACCUMULATION_BYTES[accumulation] + KAHAN_BLOCK_BYTES * (accumulation == "kahan")) / MIB


def default_workspace_mib(tokens: int, hidden: int, accumulation: Accumulation) -> float:
    """dE's sum, which slices cannot do without, and a slice of DEFAULT_SLICE_MIB or DEFAULT_SLICE_CLASSES in bf16."""
    return mib_of_sum(tokens, hidden, accumulation) + max(DEFAULT_SLICE_MIB, DEFAULT_SLICE_CLASSES * tokens * 2 / MIB)


def summed_in(
    rows: int, hidden: int, accumulation: Accumulation, workspace_mib: float, other_mib: float = 0.0
) -> Accumulation:
    """How a sum is kept: "kahan" gives way to fp32, no less exact and faster, where that fits the workspace beside other_mib:
    its point is to take half."""
    fits = mib_of_sum(rows, hidden, "fp32") + other_mib <= workspace_mib
    return "fp32" if accumulation == "kahan" and fits else accumulation


def slices(
    tokens: int,
    hidden: int,
    vocabulary: int,
    granule: int,
    buffer_classes: int,
    itemsize: int,
    c_itemsize: int | None,
    widest: int | None = None,
) -> Iterator[tuple[int, int, bool]]:
    """(first class, classes, in dC) of each slice of the vocabulary; classes are a multiple of granule, but for the last.

    A slice's gradients of the logits, tokens x classes of itemsize bytes, lie in a buffer that has room for buffer_classes, or,
    where more fits there, in the rows of dC that later slices will write. c_itemsize is that of dC's elements, None without dC.
    widest: no slice has more classes (a multiple of granule).
    """
    first = 0
    while first < vocabulary:
        left = vocabulary - first
        width, in_dc = buffer_classes, False
        if c_itemsize is not None:
            row = hidden * c_itemsize
            behind = left * row // (row + tokens * itemsize) // granule * granule
            if behind > width:
                width, in_dc = behind, True
        if widest is not None and width > widest:
            width, in_dc = widest, widest > buffer_classes
        width = min(width, left)
        yield first, width, in_dc
        first += width


def one_pass_splits(chunk: int, vocabulary: int, hidden: int, arch: Architecture) -> int:
    """Splits of the vocabulary in one pass: each program walks one split for one tile of a chunk's tokens."""
    tile = logits_tile(torch.bfloat16, hidden, arch, "exponentials")
    return vocabulary_splits(chunk, vocabulary, tile, arch)


def one_pass_bytes(
    tokens: int, chunk: int, hidden: int, vocabulary: int, accumulation: Accumulation, need_c: bool, arch: Architecture
) -> int:
    """Workspace. Of dC's sum: its fp32 copy, or rounding errors and the block that the products go through. Of a chunk: its
    exponentials, their references, partial sums, dE in fp32 (in parts where these are made in one kernel) and scaled e, which are
    gone before the sums of targets' entries come (a number per 16 of e). Of every token: eight numbers, with these sums sixteen.
    While dC's sum is in fp32, its own memory holds exponentials or parts of dE, the first of them that fits."""
    references = math.ceil(vocabulary / logits_tile(torch.bfloat16, hidden, arch, "exponentials").columns)
    splits = one_pass_splits(chunk, vocabulary, hidden, arch)
    of_c = int(mib_of_sum(vocabulary, hidden, accumulation) * MIB) if need_c else 0
    room = 2 * vocabulary * hidden if need_c and accumulation == "fp32" else 0
    of_chunk = chunk * (4 * (references + splits) + 6 * hidden)
    parts_of_e = (splits - 1) * chunk * 4 * hidden if multiplies(hidden, arch) else 0
    for size in (chunk * 2 * padded_width(vocabulary, 2), parts_of_e):
        if size <= room:
            room = 0
        else:
            of_chunk += size
    return of_c + max(of_chunk + 32 * tokens, tokens * (hidden // 16 + 64))


@functools.lru_cache(maxsize=256)
def one_pass_chunk(
    tokens: int,
    hidden: int,
    vocabulary: int,
    accumulation: Accumulation,
    workspace_mib: float | None,
    need_c: bool,
    arch: Architecture,
) -> tuple[int, Accumulation] | None:
    """(tokens of a chunk, how dC's sum is kept) if one pass fits the workspace and is expected to be faster than slices."""
    workspace = default_workspace_mib(tokens, hidden, accumulation) if workspace_mib is None else workspace_mib
    step = logits_tile(torch.bfloat16, hidden, arch, "exponentials").rows
    token_tiles = math.ceil(tokens / step)

    def fits(rows: int, kept: Accumulation) -> bool:
        return one_pass_bytes(tokens, rows * step, hidden, vocabulary, kept, need_c, arch) <= workspace * MIB

    def seconds(rows: int) -> float:
        """What depends on the chunk: how dE's product fills the GPU, and reading and writing dC's sum."""
        tiles = rows * math.ceil(hidden / 256)
        if multiplies(hidden, arch):
            busy = tiles * one_pass_splits(rows * step, vocabulary, hidden, arch)
        else:
            busy = tiles * max(1, MULTIPROCESSORS // tiles)  # few tiles are split along the vocabulary
        idle = math.ceil(busy / MULTIPROCESSORS) * MULTIPROCESSORS / busy
        return (
            product * idle + math.ceil(token_tiles / rows) * vocabulary * hidden * TRAFFIC[accumulation] / MEMORY_RATE
        )

    product = 2 * tokens * hidden * vocabulary / PRODUCT_RATE
    of_e, granule = summed_in(tokens, hidden, accumulation, workspace), FILTER_TILE[1]
    free = int((workspace - mib_of_sum(tokens, hidden, of_e)) * MIB)
    buffer_classes = max(1, free // (2 * tokens * granule)) * granule
    walk = len(list(slices(tokens, hidden, vocabulary, granule, buffer_classes, 2, 2 if need_c else None)))
    by_slices = 4 * product + walk * tokens * hidden * TRAFFIC[of_e] / MEMORY_RATE

    for kept in ("fp32", "kahan") if accumulation == "kahan" else (accumulation,):
        fitting = [rows for rows in range(token_tiles, 0, -1) if fits(rows, kept)]
        if fitting:
            break
    else:
        return None
    rows = min(fitting, key=seconds)
    return (rows * step, kept) if 2 * product + seconds(rows) < by_slices else None
