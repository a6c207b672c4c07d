"""Tile shapes of every kernel and how the work is cut, in one place: the only numbers to tune.

N tokens, D hidden, V vocabulary. Chosen for Hopper (227 KiB of shared memory and 64 Ki registers per multiprocessor); the
interpreter takes tiny tiles so that a test shape of 37 tokens still has several, with remainders.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """rows x columns of the output tile, depth of one step of the product's inner loop, and the launch parameters."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    group: int = 16  # rows of tiles that are walked together, so that their operands stay in L2


DESCRIPTOR_BYTES = 16  # a descriptor's base and rows lie at multiples of this

# Tokens x classes of the tiles on which the gradient filter decides.
FILTER_TILE = (128, 128)
INTERPRETER_FILTER_TILE = (16, 32)

MULTIPROCESSORS = 132
# Programs of the forward kernel: enough waves for a balanced end, few enough that partial results stay small.
FORWARD_PROGRAMS = 32 * MULTIPROCESSORS
PARTIALS_BYTES = 4 * 2**20
# Up to this hidden size a tile's epilogue is long beside its product: two small programs on a multiprocessor overlap them.
SMALL_HIDDEN = 512

# A slice's gradients of the logits by default: MiB, or this many classes where they are more (narrow slices keep few
# multiprocessors busy).
DEFAULT_SLICE_MIB = 64.0
DEFAULT_SLICE_CLASSES = 1024
MIB = 2**20
BIAS_PARTS_BYTES = 4 * MIB  # at most, of the sums over tiles of tokens that become dbias
# Of the fp32 block through which a Kahan sum goes: small enough to stay in L2 between the product and the addition.
KAHAN_BLOCK_BYTES = 16 * MIB


def filter_tile(interpret: bool) -> tuple[int, int]:
    return INTERPRETER_FILTER_TILE if interpret else FILTER_TILE


def logits_tile(dtype: torch.dtype, hidden: int, interpret: bool) -> Tile:
    """Tile of tokens x classes for the log-sum-exp; columns are once or twice those of the filter's tile."""
    if interpret:
        return Tile(*INTERPRETER_FILTER_TILE, 16, group=2)
    if dtype == torch.float32:
        return Tile(128, 128, 32, warps=8, stages=3)
    if hidden <= SMALL_HIDDEN:
        return Tile(128, 128, 64, warps=4, stages=3)
    return Tile(128, 256, 64, warps=8, stages=4)


def gradient_tile(dtype: torch.dtype, hidden: int, interpret: bool, filtered: bool = False) -> Tile:
    """Tile of tokens x classes for the kernel that writes logit gradients. Filtered: the filter's own tile."""
    if interpret:
        return Tile(*INTERPRETER_FILTER_TILE, 16, group=2)
    if dtype == torch.float32:
        return Tile(128, 128, 32, warps=8, stages=2)
    if filtered:
        return Tile(*FILTER_TILE, 64, warps=4, stages=3)
    return Tile(128, 256, 64, warps=8, stages=3)


def exponentials_tile(hidden: int, interpret: bool) -> Tile:
    """Tile of tokens x classes for the kernel that keeps exponentials (bf16)."""
    if interpret:
        return Tile(16, 32, 16, group=2)
    if hidden <= SMALL_HIDDEN:
        return Tile(128, 128, 64, warps=4, stages=3)
    return Tile(128, 256, 64, warps=8, stages=4)


def exponentials_programs(hidden: int) -> int:
    """Programs of that kernel per chunk of tokens: whole waves of them."""
    return (4 if hidden <= SMALL_HIDDEN else 16) * MULTIPROCESSORS


def product_tile(dtype: torch.dtype, columns: int, interpret: bool) -> Tile:
    """Tile for gradient x operand. Its rows and its depth divide the filter's tile both ways."""
    if interpret:
        return Tile(16, 16, 16, group=2)
    if dtype == torch.float32:
        return Tile(128, 64, 32, warps=8, stages=2)
    if columns <= 128:
        return Tile(128, 128, 64, warps=4, stages=3)
    return Tile(128, 256, 64, warps=8, stages=3)


def vocabulary_splits(tokens: int, vocabulary: int, tile: Tile, partials: int) -> int:
    """Splits of the vocabulary in the forward pass: each program walks one split for one tile of tokens.

    As many as FORWARD_PROGRAMS asks for and `partials` fp32 numbers per token and split fit PARTIALS_BYTES.
    """
    token_tiles = math.ceil(tokens / tile.rows)
    splits = min(math.ceil(FORWARD_PROGRAMS / token_tiles), PARTIALS_BYTES // (4 * partials * tokens))
    return max(1, min(splits, math.ceil(vocabulary / tile.columns)))
