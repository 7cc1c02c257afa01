"""Products of groups of rows, see :mod:`inl_torch.registered.grouped`.

The CPU loops over groups. Elsewhere no size is read, which would synchronize: torch's
grouped product computes bfloat16 on NVIDIA GPUs, and blocks of padded rows the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

ALIGNED = 8
"""Rows of bfloat16 that torch's grouped product takes are a multiple of 16 bytes."""


def linear(
    rows: torch.Tensor, sizes: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Multiply each group of rows by its matrix; see the op ``inl::grouped_linear``."""
    with torch.autocast(rows.device.type, enabled=False):
        matrices = weight if transposed else weight.transpose(1, 2)
        if rows.device.type == "cpu":
            return _linear_by_group(rows, sizes, matrices)
        if has_grouped_product(rows, matrices):
            matrices = matrices.repeat(len(sizes) // len(matrices), 1, 1)
            return grouped_product(rows, matrices, sizes)
        return linear_by_block(rows, sizes, matrices)


def outer(left: torch.Tensor, right: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return ``left.T @ right`` of each group; see the op ``inl::grouped_outer``."""
    with torch.autocast(left.device.type, enabled=False):
        if left.device.type == "cpu":
            return _outer_by_group(left, right, sizes)
        if has_grouped_product(left, right):
            return grouped_product(left.contiguous().t(), right.contiguous(), sizes)
        return outer_by_block(left, right, sizes)


def _linear_by_group(
    rows: torch.Tensor, sizes: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    y, count = rows.new_empty(rows.shape[0], matrices.shape[2]), matrices.shape[0]
    parts = sizes.tolist()
    split = torch.split_with_sizes
    pairs = zip(split(rows, parts), split(y, parts), strict=True)
    for group, (part, result) in enumerate(pairs):
        matrix = matrices[group % count]
        # See inl_torch.eager.linear.product.
        if part.shape[0] == 1 and part.dtype == torch.bfloat16:
            torch.mv(matrix.t(), part[0], out=result[0])
        elif part.shape[0]:
            torch.mm(part, matrix, out=result)
    return y


def _outer_by_group(
    left: torch.Tensor, right: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    parts = sizes.tolist()
    y = left.new_empty(len(parts), left.shape[1], right.shape[1])
    split = torch.split_with_sizes
    pairs = zip(split(left, parts), split(right, parts), strict=True)
    for result, (a, b) in zip(y, pairs, strict=True):
        torch.mm(a.t(), b, out=result)
    return y


def has_grouped_product(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these operands on their device."""
    return (
        left.dtype == torch.bfloat16
        and left.device.type == "cuda"
        and torch.version.hip is None
        and hasattr(functional, "grouped_mm")
        and torch.cuda.get_device_capability(left.device) >= (8, 0)
        and not any(size % ALIGNED for size in (*left.shape[1:], *right.shape[1:]))
    )


def grouped_product(
    a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Multiply groups of rows of ``a`` by matrices ``b``, or groups of columns of ``a``
    by groups of rows of ``b``.
    """
    ends: Any = sizes.cumsum(0, dtype=torch.int32)
    y: torch.Tensor = functional.grouped_mm(a, b, offs=ends)
    return y


class Blocks(NamedTuple):
    """Rows padded to blocks of one group each; all shapes depend on shapes only."""

    position: torch.Tensor
    """int64 [S]: padded row of each row."""
    group: torch.Tensor
    """int64 [blocks]: group of each block."""
    size: int

    @classmethod
    def of(cls, rows: int, sizes: torch.Tensor) -> Blocks:
        """Lay out at most twice as many rows as there are."""
        groups, device = sizes.shape[0], sizes.device
        size = max(-(-rows // groups), 1)
        count = -(-rows // size) + min(groups, rows)
        ends, block_ends = (
            sizes.cumsum(0),
            (sizes + size - 1).div(size, rounding_mode="floor").cumsum(0),
        )
        row = torch.arange(rows, device=device)
        group = torch.searchsorted(ends, row, right=True).clamp(max=groups - 1)
        blocks_before = (block_ends - (sizes + size - 1) // size)[group]
        position = blocks_before * size + row - (ends - sizes)[group]
        block = torch.arange(count, device=device)
        of_block = torch.searchsorted(block_ends, block, right=True)
        return cls(position, of_block.clamp(max=groups - 1), size)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` [S, K] as [blocks, size, K], padded with zeros."""
        padded = rows.new_zeros(self.group.shape[0] * self.size, rows.shape[1])
        padded.index_copy_(0, self.position, rows)
        return padded.view(-1, self.size, rows.shape[1])


def linear_by_block(
    rows: torch.Tensor, sizes: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    """Multiply padded blocks by copies of their matrices."""
    blocks = Blocks.of(rows.shape[0], sizes)
    copies = matrices.index_select(0, blocks.group % matrices.shape[0])
    y = torch.bmm(blocks.pad(rows), copies)
    return y.flatten(0, 1).index_select(0, blocks.position)


def outer_by_block(
    left: torch.Tensor, right: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Multiply padded blocks and add those of each group."""
    blocks = Blocks.of(left.shape[0], sizes)
    each = torch.bmm(blocks.pad(left).transpose(1, 2), blocks.pad(right))
    zeros = left.new_zeros(sizes.shape[0], *each.shape[1:])
    return zeros.index_add_(0, blocks.group, each)
