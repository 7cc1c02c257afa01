"""Launches of products with block-sparse matrices; one for each call.

The lists of blocks are copied to a device at the first call with a structure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from inl.spec.block_structure import BlockStructure
from inl_torch.triton.common import DTYPES, dense, spread

LEAST = 16
"""Blocks are multiples of it: the smallest tile of the matrix units."""


class Tile(NamedTuple):
    """Launch parameters."""

    rows: int
    columns: int
    """At most; a tile divides a block."""
    inner: int
    group: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Launch parameters of one dtype, as measured on an H200."""

    large: Tile
    small: Tile
    """Of results of fewer tiles than would occupy the device."""
    sampled: Tile
    """Of blocks of a gradient."""


FLOAT32 = Tiles(
    Tile(128, 64, 32, 8, 4, 3), Tile(32, 64, 64, 8, 4, 3), Tile(64, 64, 32, 8, 4, 3)
)
HALF = Tiles(
    Tile(128, 128, 64, 8, 8, 5), Tile(64, 128, 64, 8, 4, 6), Tile(128, 128, 32, 8, 4, 5)
)

HIP_STAGES = 2
"""Most pipeline stages on AMD's chips, whose shared memory is 64 KiB."""

HIP_WARPS = 8
"""Fewest warps there: with 4 of 32 lanes, tiles of 128 x 128 spill registers."""

PROGRAMS = 264
"""Fewest programs of large tiles."""


class Lists(NamedTuple):
    """The lists of :class:`~inl.spec.block_structure.BlockLists` on a device."""

    order: torch.Tensor
    starts: torch.Tensor
    blocks: torch.Tensor
    others: torch.Tensor


def is_supported(x: torch.Tensor, size: int) -> bool:
    """Whether the kernels support arrays like ``x`` and blocks of ``size``."""
    return str(x.dtype).removeprefix("torch.") in DTYPES and size % LEAST == 0


def multiply(
    x: torch.Tensor, values: torch.Tensor, structure: BlockStructure, transposed: bool
) -> torch.Tensor:
    """Return ``x`` [M, K] times the matrix [K, N], or [N, K] if ``transposed``."""
    size, rows = structure.size, x.shape[0]
    lists = _lists(structure, x.device, transposed)
    columns = len(lists.order)
    x, values = dense(x), values.contiguous()
    y = torch.empty((rows, columns * size), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tile = _tile(x, rows, columns, size)
    strides = (1, size) if transposed else (size, 1)
    grid = -(-rows // tile.rows) * columns * (size // tile.columns)
    _kernels().columns_product[(grid,)](
        x, values, *lists, y, rows, x.stride(0), columns * size, *strides, SIZE=size,
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, GROUP=tile.group,
        PRECISION=precision(x), num_warps=spread(tile.warps, x),
        num_stages=tile.stages,
    )  # fmt: skip
    return y


def sample(
    left: torch.Tensor, right: torch.Tensor, structure: BlockStructure
) -> torch.Tensor:
    """Return the stored blocks of ``left.T @ right``: [B, b, b].

    left: [M, K]. right: [M, N].
    """
    size, count = structure.size, len(structure.where)
    left, right = dense(left), dense(right)
    y = torch.empty((count, size, size), dtype=left.dtype, device=left.device)
    if not count:
        return y
    places = structure.copy(
        (left.device, "places"), lambda: _copied(structure.where, left.device)
    )
    tiles = FLOAT32 if left.dtype == torch.float32 else HALF
    tile = _fitted(tiles.sampled, size)
    edge = min(tile.rows, tile.columns)
    _kernels().blocks_product[(count, (size // edge) ** 2)](
        left, right, places, y, left.shape[0], left.stride(0), right.stride(0),
        SIZE=size, ROWS=edge, COLUMNS=edge, INNER=32, PRECISION=sampled_precision(left),
        num_warps=spread(tile.warps, left), num_stages=tile.stages,
    )  # fmt: skip
    return y


def precision(x: torch.Tensor) -> str:
    """Return the arithmetic of products of float32, by torch's setting for them.

    Three products of TF32 parts have the error of IEEE arithmetic, or less, in less
    time. Only NVIDIA's matrix units since capability 8.0 compute them.
    """
    if x.device.type != "cuda" or torch.version.hip is not None:
        return "ieee"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def sampled_precision(x: torch.Tensor) -> str:
    """Likewise, of gradients: their operands would be split at each use."""
    found = precision(x)
    return "ieee" if found == "tf32x3" else found


def _tile(x: torch.Tensor, rows: int, columns: int, size: int) -> Tile:
    """Return the tile for a result of ``columns`` blocks of columns."""
    tiles = FLOAT32 if x.dtype == torch.float32 else HALF
    most = _divisor(size, tiles.large.columns)
    programs = -(-rows // tiles.large.rows) * columns * (size // most)
    return _fitted(tiles.large if programs >= PROGRAMS else tiles.small, size)


def _fitted(tile: Tile, size: int) -> Tile:
    """Restrict a tile to what divides a block, and to what AMD's chips can hold."""
    tile = tile._replace(
        columns=_divisor(size, tile.columns), inner=_divisor(size, tile.inner)
    )
    if torch.version.hip is None:
        return tile
    return tile._replace(
        warps=max(tile.warps, HIP_WARPS), stages=min(tile.stages, HIP_STAGES)
    )


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two up to ``most`` that divides ``size``."""
    return min(size & -size, most)


def _lists(structure: BlockStructure, device: torch.device, transposed: bool) -> Lists:
    def make() -> Lists:
        lists = structure.by_row() if transposed else structure.by_column()
        return Lists(*(_copied(each, device) for each in lists))

    return structure.copy((device, transposed), make)


def _copied(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)


def _kernels() -> Any:
    from inl_torch.triton.sparse import kernels

    return kernels
