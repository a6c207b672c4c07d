"""Tile shapes of every kernel and how the work is cut, in one place: the only numbers to tune.

N tokens, D hidden, V vocabulary. Chosen for Hopper (227 KiB of shared memory and 64 Ki registers per multiprocessor); the
interpreter takes tiny tiles so that a test shape of 37 tokens still has several, with remainders.
"""

import functools
import math
import os
from dataclasses import dataclass
from typing import Literal

import torch

# How the kernels over tiles of logits run: for bf16 and fp16 on NVIDIA's Hopper with specialized warps (cce/kernels/hopper), on any
# other GPU and for fp32 as plain Triton, under TRITON_INTERPRET=1 on the CPU.
Architecture = Literal["hopper", "other", "interpreter"]
# Of Triton: Gluon, which the kernels for Hopper are written in, is experimental there. With others they run as plain Triton.
GLUON_VERSIONS = ("3.6.", "3.7.")


def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU: TRITON_INTERPRET, read as Triton does."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@torch.compiler.assume_constant_result
def architecture(device: torch.device, dtype: torch.dtype) -> Architecture:
    if device.type == "cpu" or interpreting():
        return "interpreter"
    return "hopper" if _on_hopper(device, dtype) and _has_gluon() else "other"


@functools.cache  # every kernel's launch asks
def _on_hopper(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products are made by the tensor cores of NVIDIA's Hopper, 16 at a time. (An AMD GPU may have the same capability.)"""
    if device.type != "cuda" or torch.version.cuda is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _has_gluon() -> bool:
    import triton

    return triton.__version__.startswith(GLUON_VERSIONS)


def sum_gain(hidden: int) -> float:
    """What to multiply a sum of `hidden` products with that Hopper's tensor cores made, bf16 or fp16 into fp32.

    They add 16 products to a sum at a time and cut off what lies below its last bit, always toward zero: about a third of a unit in
    the last place an addition (measured: experiments/loss_heads/cut_off.py). So |z| comes out too small, in proportion to what the
    sum was on its way: on average half of z, where sums of every other tile of classes go through the hidden dimension backward (but
    where Hopper's kernels keep tokens: there they are short). With the gain logits are right on average: an error common to all
    tokens becomes one that differs from token to token.
    """
    return 1.0 + math.ceil(hidden / 64) * 2.0**-24


def gain(hidden: int, device: torch.device, dtype: torch.dtype) -> float:
    """sum_gain where it is known to hold; 1 on other GPUs, for fp32 and in the interpreter."""
    return sum_gain(hidden) if _on_hopper(device, dtype) and not interpreting() else 1.0


@dataclass(frozen=True)
class Tile:
    """rows x columns of the output tile, depth of one step of the product's inner loop, and the launch parameters."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    group: int = 16  # rows of tiles that are walked together, so that their operands stay in L2
    start: float = 0.25  # what a program's next item costs beside its tiles, in tiles


HOPPER_TILE = Tile(128, 256, 64)
HOPPER_NARROW_TILE = Tile(128, 128, 64, start=1.25)
# An item's start is its rows of e or c, a product of nothing, and the sums to store.
HOPPER_STREAMING_TILE = Tile(128, 64, 64, start=4.0)

DESCRIPTOR_BYTES = 16  # a descriptor's base and rows lie at multiples of this

# Tokens x classes of the tiles on which the gradient filter decides.
FILTER_TILE = (128, 128)
INTERPRETER_FILTER_TILE = (16, 32)

MULTIPROCESSORS = 132
# Up to this hidden size a program on Hopper keeps its tokens' rows in shared memory.
KEPT_HIDDEN = 256
PARTIALS_BYTES = 4 * 2**20  # at most, of the forward pass' sums over parts of the vocabulary
MOST_TILES = 64  # of an item

# A slice's gradients of the logits by default: MiB, or this many classes where they are more (narrow slices keep few
# multiprocessors busy).
DEFAULT_SLICE_MIB = 64.0
DEFAULT_SLICE_CLASSES = 1024
MIB = 2**20
BIAS_PARTS_BYTES = 4 * MIB  # at most, of the sums over tiles of tokens that become dbias
# Of the fp32 block through which a Kahan sum goes: small enough to stay in L2 between the product and the addition. Where dC has no sum
# its rows go through the memory of dE's chunk, or of such a block where that is less.
BLOCK_BYTES = 16 * MIB


def padded_width(hidden: int, itemsize: int) -> int:
    """Columns of a row that descriptors can address: a multiple of 16 bytes."""
    granule = DESCRIPTOR_BYTES // itemsize
    return -(-hidden // granule) * granule


def filter_tile(arch: Architecture) -> tuple[int, int]:
    return INTERPRETER_FILTER_TILE if arch == "interpreter" else FILTER_TILE


def logits_tile(dtype: torch.dtype, hidden: int, arch: Architecture, stored: bool) -> Tile:
    """Tile of tokens x classes for the kernels that make logits; columns are once or twice those of the filter's tile.

    stored: the kernel writes a number per logit.
    """
    if arch == "interpreter":
        return Tile(*INTERPRETER_FILTER_TILE, 16, group=2)
    if dtype == torch.float32:
        return Tile(128, 128, 32, warps=8, stages=2)
    if arch == "hopper":
        return HOPPER_NARROW_TILE if stored and hidden <= KEPT_HIDDEN else HOPPER_TILE
    return Tile(128, 128, 64, warps=4, stages=3)


@functools.lru_cache(maxsize=256)
def vocabulary_splits(tokens: int, vocabulary: int, tile: Tile, arch: Architecture, most: int | None = None) -> int:
    """Splits of the vocabulary, at most `most`: programs walk items of one split for one tile of tokens. All should end at the
    same time, and no more than two groups of tiles of tokens should be walked at once: their rows would not stay in L2."""
    token_tiles, class_tiles = math.ceil(tokens / tile.rows), math.ceil(vocabulary / tile.columns)
    programs = 4 if arch == "interpreter" else MULTIPROCESSORS
    longest = MOST_TILES
    if token_tiles > 2 * tile.group:
        longest = min(longest, math.ceil(class_tiles * tile.group / programs))
    most = class_tiles if most is None else min(class_tiles, max(1, most))
    least = min(most, math.ceil(class_tiles / longest))
    groups = math.ceil(token_tiles / tile.group)
    divided = token_tiles * class_tiles / programs

    def busiest(splits: int) -> float:
        """Tiles, at most, of the program that has most to do: of each group the longer items come first (part_of)."""
        rounds = math.ceil(token_tiles * splits / programs)
        shorter, longer = divmod(class_tiles, splits)
        one_more = math.ceil(token_tiles * longer / programs) + groups - 1
        return rounds * (shorter + tile.start) + min(rounds, one_more if longer else 0)

    best, fewest = least, busiest(least)
    for splits in range(least + 1, most + 1):
        if divided + math.ceil(token_tiles * splits / programs) * tile.start >= fewest:
            break  # the starts of so many items take more than a better division can win
        if (tiles := busiest(splits)) < fewest:
            best, fewest = splits, tiles
    return best


def streams(hidden: int, arch: Architecture) -> bool:
    """Whether kernels can keep rows of e or c in shared memory, and the sum of their gradient in registers, while the other streams
    by."""
    return arch == "hopper" and hidden <= KEPT_HIDDEN


@functools.cache
def streaming_splits(rows: int, columns: int) -> tuple[int, float]:
    """(parts of the columns, so that all programs end at the same time; tiles, of the program that has most to do)."""
    tile = HOPPER_STREAMING_TILE
    row_tiles, column_tiles = math.ceil(rows / tile.rows), math.ceil(columns / tile.columns)

    def busiest(splits: int) -> float:
        return math.ceil(row_tiles * splits / MULTIPROCESSORS) * (math.ceil(column_tiles / splits) + tile.start)

    splits = min(range(1, min(column_tiles, MULTIPROCESSORS) + 1), key=busiest)
    return splits, busiest(splits)


def product_tile(dtype: torch.dtype, columns: int, arch: Architecture) -> Tile:
    """Tile for gradient x operand. Its rows and its depth divide the filter's tile both ways."""
    if arch == "interpreter":
        return Tile(16, 16, 16, group=2)
    if dtype == torch.float32:
        return Tile(128, 64, 32, warps=8, stages=2)
    if columns <= 128:
        return Tile(128, 128, 64, warps=4, stages=3)
    return Tile(128, 256, 64, warps=8, stages=3)
