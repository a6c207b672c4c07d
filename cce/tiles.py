"""Tile shapes of every kernel, in one place: the only numbers to tune.

N tokens, D hidden, V vocabulary. Chosen for Hopper (228 KiB of shared memory and 64 Ki registers per multiprocessor);
the interpreter takes tiny tiles so that a test shape of 37 tokens still has several, with remainders.
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


# Tokens x classes of the tiles on which the gradient filter decides.
FILTER_TILE = (128, 128)
INTERPRETER_FILTER_TILE = (16, 32)

MULTIPROCESSORS = 132
# Programs of the forward kernel: enough waves for a balanced end, few enough that partial results stay small.
FORWARD_PROGRAMS = 32 * MULTIPROCESSORS
PARTIALS_BYTES = 4 * 2**20
DEFAULT_WORKSPACE_MIB = 64.0


def filter_tile(interpret: bool) -> tuple[int, int]:
    return INTERPRETER_FILTER_TILE if interpret else FILTER_TILE


def logits_tile(dtype: torch.dtype, hidden: int, interpret: bool, filtered: bool = False) -> Tile:
    """Tile of tokens x classes for the kernels that compute logits. Filtered: the filter's own tile."""
    if interpret:
        return Tile(*INTERPRETER_FILTER_TILE, 16, group=2)
    if dtype == torch.float32:
        return Tile(128, 128, 16, warps=8, stages=2) if filtered else Tile(64, 64, 32, stages=2)
    if filtered or hidden < 512:
        return Tile(128, 128, 64, warps=4 if hidden < 512 else 8, stages=3)
    return Tile(128, 256, 64, warps=8, stages=3)


def product_tile(dtype: torch.dtype, columns: int, interpret: bool) -> Tile:
    """Tile for gradient x operand. Rows and depth divide FILTER_TILE both ways, so that a step lies in one tile."""
    if interpret:
        return Tile(16, 16, 16, group=2)
    if dtype == torch.float32:
        return Tile(64, 64, 32, stages=2)
    if columns <= 128:
        return Tile(128, 128, 64, warps=4, stages=3)
    return Tile(128, 256, 64, warps=8, stages=3)


def vocabulary_splits(tokens: int, vocabulary: int, tile: Tile, partials: int) -> tuple[int, int]:
    """(splits, tiles per split) of the forward pass: each program walks one split for one tile of tokens.

    As many splits as FORWARD_PROGRAMS asks for and `partials` fp32 numbers per token and split fit PARTIALS_BYTES.
    """
    vocabulary_tiles = math.ceil(vocabulary / tile.columns)
    token_tiles = math.ceil(tokens / tile.rows)
    splits = min(math.ceil(FORWARD_PROGRAMS / token_tiles), PARTIALS_BYTES // (4 * partials * tokens))
    per_split = math.ceil(vocabulary_tiles / max(1, min(splits, vocabulary_tiles)))
    return math.ceil(vocabulary_tiles / per_split), per_split


def slice_width(tokens: int, vocabulary: int, itemsize: int, workspace_mib: float | None, granule: int) -> int:
    """Columns of the backward's gradient slice: what fits the workspace, balanced, a multiple (>= 1) of `granule`."""
    workspace = DEFAULT_WORKSPACE_MIB if workspace_mib is None else workspace_mib
    fits = max(1, int(workspace * 2**20) // (max(1, tokens) * itemsize * granule)) * granule
    slices = math.ceil(vocabulary / fits)
    return math.ceil(math.ceil(vocabulary / slices) / granule) * granule
