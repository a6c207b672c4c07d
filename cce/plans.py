"""Which way to walk the gradient takes, from the shape and the memory that it may use.

slices     backward pass: slices of the vocabulary, logits made again: 4 products; dE adds up over slices.
one pass   forward pass; needs the upstream gradient to be one number, which can be multiplied in later. Either
           chunks of tokens, exponentials kept: 3 products; dC adds up over chunks; or, for small D on Hopper,
           nothing kept, both gradients added up in registers: 4 products in two kernels.

N tokens, D hidden, V vocabulary. Workspace: bytes beyond inputs and gradients.
"""

import functools
import math
from collections.abc import Iterator
from typing import Literal

import torch

from cce.presets import Accumulation
from cce.tiles import (
    BLOCK_BYTES,
    DEFAULT_SLICE_CLASSES,
    DEFAULT_SLICE_MIB,
    FILTER_TILE,
    HOPPER_STREAMING_TILE,
    MIB,
    MULTIPROCESSORS,
    Architecture,
    logits_tile,
    padded_width,
    streaming_splits,
    streams,
    vocabulary_splits,
)

# Rates that the ways are compared at, an H200's: products in FLOP/s, memory in bytes/s. On another GPU the choice is a guess.
PRODUCT_RATE = 650e12
REGISTERS_RATE = 700e12  # of the two kernels that add up in registers (experiments/loss_heads/trace_kernels.py)
MEMORY_RATE = 4e12
LOGITS_RATE = 0.75e12  # logits/s that an epilogue makes numbers of: what bounds kernels where D is small
# Of a product whose tiles do not fill rounds of the GPU; a guess: the vendor's library has tiles of other sizes, too.
MOST_IDLE = 0.13
CHUNK_SECONDS = 25e-6  # of a chunk or slice beside its products: launches, small kernels
BLOCK_SECONDS = 6e-6  # of a block of a Kahan sum beside its traffic, each time: small products

# Bytes per element of dE or dC: what an accumulation takes beside a gradient in bf16, and what it reads and writes each time.
ACCUMULATION_BYTES: dict[Accumulation, int] = {"fp32": 4, "kahan": 2, "plain": 0}
TRAFFIC: dict[Accumulation, int] = {"fp32": 8, "kahan": 8, "plain": 4}

# How one pass keeps dC's sum.
Sum = Accumulation | Literal["registers"]


def mib_of_sum(rows: int, hidden: int, accumulation: Accumulation) -> float:
    """What a sum in bf16 takes beside itself: its fp32 copy, or rounding errors and the block that products go through."""
    return (rows * hidden * ACCUMULATION_BYTES[accumulation] + BLOCK_BYTES * (accumulation == "kahan")) / MIB


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
    tile = logits_tile(torch.bfloat16, hidden, arch, stored=True)
    return vocabulary_splits(chunk, vocabulary, tile, arch)


def classes_in_dc(tokens: int, chunk: int, hidden: int, vocabulary: int, columns: int) -> int:
    """Classes, the last ones, whose exponentials of a chunk lie in dC's own memory, as large as a gradient in bf16; the others are a
    multiple of `columns`.

    They have it to themselves while dC adds up elsewhere. Where the chunk is all tokens dC does not add up: they leave room for the
    rows of dC that come of them, the last ones.
    """
    if chunk < tokens:
        most = vocabulary * hidden // chunk
        if most >= padded_width(vocabulary, 2):
            return vocabulary
    else:
        most = vocabulary * hidden // (tokens + hidden)
    most = most // 8 * 8  # rows at multiples of 16 bytes
    return max(0, vocabulary - math.ceil((vocabulary - most) / columns) * columns)


def one_pass_bytes(
    tokens: int, chunk: int, hidden: int, vocabulary: int, accumulation: Accumulation, need_c: bool, arch: Architecture
) -> int:
    """Workspace. Of dC's sum, where there are several chunks: its fp32 copy, or rounding errors and the block that the products go
    through. Of a chunk: the exponentials that do not lie in dC's own memory, their references, partial sums, dE (or a block of dC)
    in fp32 and scaled e. Of every token: sixteen numbers, and for the sums of targets' entries one per 16 of e. Of every class:
    two."""
    chunk, columns = min(chunk, tokens), logits_tile(torch.bfloat16, hidden, arch, stored=True).columns
    of_all = chunk == tokens
    references = math.ceil(vocabulary / columns)
    sizes = {chunk, tokens % chunk or chunk}  # the last chunk is what is left
    parts = sum(n * one_pass_splits(n, vocabulary, hidden, arch) for n in sizes)
    of_c, in_dc, x = 0, 0, 4 * hidden * chunk
    if need_c and (of_all or accumulation == "fp32"):
        in_dc = classes_in_dc(tokens, chunk, hidden, vocabulary, columns)
    if need_c and of_all:
        x = max(x, min(4 * hidden * vocabulary, BLOCK_BYTES))
    elif need_c:
        of_c = int(mib_of_sum(vocabulary, hidden, accumulation) * MIB)
    exponentials = chunk * 2 * padded_width(vocabulary - in_dc, 2)
    of_chunk = exponentials + x + chunk * (4 * references + 2 * hidden) + 4 * parts
    return of_c + of_chunk + tokens * (64 + hidden // 16) + vocabulary * 8


def product_rows(most: int, hidden: int) -> int:
    """Rows, at most `most`, of a product with `hidden` columns, so that its tiles of 128 x 256 are whole rounds of the GPU, or few.
    A multiple of 8, which keeps 16 bytes aligned, unless there are fewer."""
    columns = math.ceil(hidden / 256)
    rounds = most // 128 * columns // MULTIPROCESSORS
    of_rounds = rounds * MULTIPROCESSORS // columns * 128
    return of_rounds or most // 8 * 8 or most


def in_registers_bytes(tokens: int, chunk: int, hidden: int, vocabulary: int, need_c: bool) -> int:
    """Workspace where dC's sum is kept in registers: dE of a chunk in fp32, in parts of the vocabulary, unless dC's own memory has
    room; what the parts are merged by; and eight numbers of every token."""
    splits, _ = streaming_splits(chunk, vocabulary)
    of_e = splits * chunk * hidden * 4
    room = 2 * vocabulary * hidden if need_c else 0
    return (of_e if of_e > room else 0) + 8 * splits * chunk + 32 * tokens


def _sum_seconds(rows: int, hidden: int, accumulation: Accumulation) -> float:
    """Adding to a sum [rows, hidden] once."""
    blocks = math.ceil(4 * rows * hidden / BLOCK_BYTES) if accumulation == "kahan" else 0
    return rows * hidden * TRAFFIC[accumulation] / MEMORY_RATE + blocks * BLOCK_SECONDS


def _logits_seconds(tokens: int, hidden: int, vocabulary: int) -> float:
    return tokens * vocabulary * max(2 * hidden / PRODUCT_RATE, 1 / LOGITS_RATE)


def _product_seconds(tokens: int, hidden: int, vocabulary: int) -> float:
    """Of a gradient from numbers in memory, two bytes a logit."""
    return tokens * vocabulary * max(2 * hidden / PRODUCT_RATE, 2 / MEMORY_RATE)


def _in_registers(
    tokens: int, hidden: int, vocabulary: int, workspace: float, need_c: bool
) -> tuple[float, int, Sum] | None:
    """(seconds of the kernels for dE and for dC, tokens of a chunk, "registers")."""
    tile = HOPPER_STREAMING_TILE
    of_tile = MULTIPROCESSORS * tile.rows * tile.columns * max(4 * hidden / REGISTERS_RATE, 1 / LOGITS_RATE)

    def seconds(chunk: int) -> float:
        return math.ceil(tokens / chunk) * (streaming_splits(chunk, vocabulary)[1] * of_tile + CHUNK_SECONDS)

    def taken(chunk: int) -> int:
        return in_registers_bytes(tokens, chunk, hidden, vocabulary, need_c)

    most = min(math.ceil(tokens / tile.rows), 2 * MULTIPROCESSORS)
    chunks = (rows * tile.rows for rows in range(most, 0, -1))
    fitting = [(seconds(chunk), chunk) for chunk in chunks if taken(chunk) <= workspace * MIB]
    if not fitting:
        return None
    fastest, _ = min(fitting)
    chunk = min((chunk for time, chunk in fitting if time <= 1.02 * fastest), key=taken)
    rounds = math.ceil(math.ceil(vocabulary / tile.rows) / MULTIPROCESSORS)
    of_c = rounds * (math.ceil(tokens / tile.columns) + tile.start) * of_tile if need_c else 0.0
    return seconds(chunk) + of_c, chunk, "registers"


def _by_chunks(
    tokens: int,
    hidden: int,
    vocabulary: int,
    accumulation: Accumulation,
    workspace: float,
    needs: tuple[bool, bool],
    arch: Architecture,
) -> tuple[float, int, Sum] | None:
    """(seconds, tokens of a chunk, how dC's sum is kept)."""
    need_e, need_c = needs
    step = logits_tile(torch.bfloat16, hidden, arch, stored=True).rows
    token_tiles = math.ceil(tokens / step)

    def fits(rows: int, kept: Accumulation) -> bool:
        return one_pass_bytes(tokens, rows * step, hidden, vocabulary, kept, need_c, arch) <= workspace * MIB

    def most_tiles(kept: Accumulation) -> int:
        """Of tokens, in one of several chunks that fits; 0 if none does."""
        low, high = 0, token_tiles - 1
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle, kept):
                low = middle
            else:
                high = middle - 1
        return low

    product = _product_seconds(tokens, hidden, vocabulary)
    logits = _logits_seconds(tokens, hidden, vocabulary)

    def of_chunk(rows: int, kept: Accumulation) -> float:
        """Beside full-rate products: adding to dC's sum, and what dE's product leaves idle."""
        if rows == 0:
            return 0.0
        of_product = _product_seconds(rows * step, hidden, vocabulary)
        of_sum = _sum_seconds(vocabulary, hidden, kept) if need_c and rows < token_tiles else 0.0
        if kept == "fp32":  # most of the traffic is hidden by the product that makes it, the more the longer that is
            of_sum *= of_sum / (of_sum + of_product)
        # By tiles of 128 x 256; few are split along the vocabulary.
        tiles = rows * math.ceil(hidden / 256)
        busy = tiles * max(1, MULTIPROCESSORS // tiles) / MULTIPROCESSORS
        return of_sum + need_e * of_product * min(math.ceil(busy) / busy - 1, MOST_IDLE) + CHUNK_SECONDS

    def seconds(rows: int, kept: Accumulation) -> float:
        whole, rest = divmod(token_tiles, rows)
        return logits + product * (need_c + need_e) + whole * of_chunk(rows, kept) + of_chunk(rest, kept)

    if fits(token_tiles, accumulation):  # nothing adds up
        return seconds(token_tiles, accumulation), token_tiles * step, accumulation
    for kept in ("fp32", "kahan") if accumulation == "kahan" else (accumulation,):
        most = most_tiles(kept)
        if most > 0:
            break
    else:
        return None
    choices = [rows for rows in range(max(1, most - MULTIPROCESSORS), most + 1) if fits(rows, kept)]
    fastest = min(seconds(rows, kept) for rows in choices)
    # The least memory of equally fast ones.
    rows = next(rows for rows in choices if seconds(rows, kept) <= 1.002 * fastest)
    return seconds(rows, kept), rows * step, kept


@functools.lru_cache(maxsize=256)
def one_pass_chunk(
    tokens: int,
    hidden: int,
    vocabulary: int,
    accumulation: Accumulation,
    workspace_mib: float | None,
    needs: tuple[bool, bool],
    arch: Architecture,
) -> tuple[int, Sum] | None:
    """(tokens of a chunk, how dC's sum is kept) if one pass fits the workspace and is expected to be faster than slices.

    needs: which of dE, dC. Sums in registers are for both, or dE: they come from a kernel that makes dE.
    """
    need_e, need_c = needs
    workspace = default_workspace_mib(tokens, hidden, accumulation) if workspace_mib is None else workspace_mib
    ways = [_by_chunks(tokens, hidden, vocabulary, accumulation, workspace, needs, arch)]
    if streams(hidden, arch) and need_e:
        ways.append(_in_registers(tokens, hidden, vocabulary, workspace, need_c))

    of_e, granule = summed_in(tokens, hidden, accumulation, workspace), FILTER_TILE[1]
    free = int((workspace - mib_of_sum(tokens, hidden, of_e)) * MIB)
    buffer_classes = max(1, free // (2 * tokens * granule)) * granule
    walk = len(list(slices(tokens, hidden, vocabulary, granule, buffer_classes, 2, 2 if need_c else None)))
    of_slices = walk * (need_e * _sum_seconds(tokens, hidden, of_e) + CHUNK_SECONDS)
    product = _product_seconds(tokens, hidden, vocabulary)
    by_slices = 2 * _logits_seconds(tokens, hidden, vocabulary) + product * (need_e + need_c) + of_slices

    faster = [way for way in ways if way is not None and way[0] < by_slices]
    if not faster:
        return None
    fastest, *_ = min(faster)
    # Registers need next to no workspace: they may take a little longer.
    _, chunk, kept = [way for way in faster if way[0] <= 1.03 * fastest][-1]
    return chunk, kept
