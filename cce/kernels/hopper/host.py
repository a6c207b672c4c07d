"""Descriptors and grids of the kernels beside this file."""

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cce.kernels.hopper.pipeline import BLOCK, DEPTH, ROWS, TOKENS
from cce.tiles import KEPT_HIDDEN, Tile

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Warps of the first group. 65536 registers over the 12 warps of three warpgroups; the kernels hand most of them to two.
LAUNCH = dict(num_warps=4, maxnreg=168)


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], SWIZZLED)


def operands(e_ND: torch.Tensor, c_VD: torch.Tensor, tile: Tile) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of the blocks that come at a step. e, c: `addressable`, bf16 or fp16."""
    return descriptor(e_ND, ROWS.value, DEPTH.value), descriptor(c_VD, tile.columns, DEPTH.value)


def result(matrix: torch.Tensor) -> TensorDescriptor:
    """Of the blocks that are stored."""
    return descriptor(matrix, ROWS.value, BLOCK.value)


def programs(rows: int, splits: int, device: torch.device) -> tuple[int]:
    """Grid for items of 128 rows, split: a program a multiprocessor, or fewer."""
    items = triton.cdiv(rows, TOKENS.value) * splits
    return (min(items, torch.cuda.get_device_properties(device).multi_processor_count),)


def walk(tokens: int, e_ND: torch.Tensor, splits: int) -> tuple[tuple[int], dict]:
    """(grid, constants) of the kernels whose operands come in steps."""
    D = e_ND.shape[1]
    constants = dict(STEPS=triton.cdiv(D, DEPTH.value), KEEP=D <= KEPT_HIDDEN)
    return programs(tokens, splits, e_ND.device), constants
