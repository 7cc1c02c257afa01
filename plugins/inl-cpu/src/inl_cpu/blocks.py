"""Copies of blocks between the native cache layout and that of all backends.

The layout of a tile is defined in ``native/runtime/matrix.h``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.block_io import BlockIO, Blocks
from inl.spec.cache_layout import BITS, stored_bits
from inl_cpu.abi import LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.spec.cache import Paged, State
    from inl_cpu.kernels.attention import NativeCache

    Array = NDArray[Any]

PACKED = {"float32": 1, "bfloat16": 2, "int8": 4}
"""Neighbors of a tile: numbers of a key, and values of as many keys; else 1."""

INT8_ZERO = 128
"""Stored code of zero in int8."""


class Side:
    """Keys or values of a layer's cache."""

    def __init__(self, cache: NativeCache, dtype: str, *, is_value: bool) -> None:
        self.size, self.dim = cache.block_size, cache.head_dim
        self._tiles, self._heads = -(-self.size // LANES), cache.kv_heads
        self._width = -(-self.dim // LANES) * LANES
        self._packed, self._is_value = PACKED.get(dtype, 1), is_value
        stored = np.dtype("uint8" if dtype == "int8" else BITS.get(dtype, dtype))
        data = (cache.v if is_value else cache.k).view(np.uint8)
        tiles = data.reshape(cache.blocks, self._heads, self._tiles, -1)
        at = LANES * self._width * stored.itemsize
        self._numbers = tiles[..., :at].view(stored)
        self.dtype = stored
        self._scales = tiles[..., at:].view(np.float32)

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of the values of ``count`` blocks."""
        return count, self.size, self._heads, self.dim

    def read(self, blocks: Array, out: Array) -> None:
        """Copy the stored numbers to ``out`` [n, block_size, kv_heads, head_dim]."""
        # A slice of one block is no copy of it.
        is_one = len(blocks) == 1
        found = self._numbers[slice(blocks[0], blocks[0] + 1) if is_one else blocks]
        packed, shape = self._packed, found.shape[:3]
        if self._is_value:
            cells = found.reshape(*shape, LANES // packed, self._width, packed)
            cells = cells.transpose(0, 2, 3, 5, 1, 4)
        else:
            cells = found.reshape(*shape, self._width // packed, LANES, packed)
            cells = cells.transpose(0, 2, 4, 1, 3, 5)
        if (self._tiles * LANES, self._width) == (self.size, self.dim):
            to = out.reshape(cells.shape)
            if not self._is_value and packed > 1:  # neighbors are 4 bytes in both
                cells, to = cells.view(np.uint32), to.view(np.uint32)
            to[...] = cells
            return
        rows = cells.reshape(len(blocks), -1, self._heads, self._width)
        out[...] = rows[:, : self.size, :, : self.dim]

    def write(self, blocks: Array, cells: Array) -> None:
        """Overwrite numbers by ``cells`` of :meth:`read`."""
        count, packed = len(blocks), self._packed
        rows = np.zeros(
            (count, self._tiles * LANES, self._heads, self._width), cells.dtype
        )
        rows[:, : self.size, :, : self.dim] = cells
        tiles = count, self._tiles
        if self._is_value:
            shape = *tiles, LANES // packed, packed, self._heads, self._width
            axes = 0, 4, 1, 2, 5, 3
        else:
            shape = *tiles, LANES, self._heads, self._width // packed, packed
            axes = 0, 3, 1, 4, 2, 5
        stored = rows.reshape(shape).transpose(axes)
        self._numbers[blocks] = stored.reshape(count, self._heads, self._tiles, -1)

    def read_scales(self, blocks: Array) -> Array:
        """Return the scales [n, block_size, kv_heads] of int8."""
        lanes = self._scales[blocks].transpose(0, 2, 3, 1)
        return lanes.reshape(len(blocks), -1, self._heads)[:, : self.size]

    def write_scales(self, blocks: Array, scales: Array) -> None:
        """Overwrite the scales of int8."""
        rows = np.zeros((len(blocks), self._tiles * LANES, self._heads), np.float32)
        rows[:, : self.size] = scales
        lanes = rows.reshape(len(blocks), self._tiles, LANES, self._heads)
        self._scales[blocks] = lanes.transpose(0, 3, 1, 2)


def sides(state: State, group: Paged) -> list[Side]:
    """Return keys and values of each layer in turn."""
    return [
        Side(state.caches[layer], group.dtype, is_value=is_value)
        for layer in group.layers
        for is_value in (False, True)
    ]


def read(state: State, group: Paged, blocks: Array) -> Blocks:
    each = sides(state, group)
    cells = np.empty((len(each), *each[0].shape(len(blocks))), each[0].dtype)
    for side, out in zip(each, cells, strict=True):
        side.read(blocks, out)
    cells = cells.reshape(len(group.layers), 2, *cells.shape[1:])
    if group.dtype != "int8":
        return Blocks(cells)
    scales = np.stack([side.read_scales(blocks) for side in each])
    codes = (cells - np.uint8(INT8_ZERO)).view(np.int8)
    return Blocks(codes, scales.reshape(cells.shape[:-1]))


def write(state: State, group: Paged, blocks: Array, contents: Blocks) -> State:
    cells: Array = contents.cells
    if group.dtype == "int8":
        cells = cells.view(np.uint8) + np.uint8(INT8_ZERO)
    each = sides(state, group)
    flat = cells.reshape(len(each), *cells.shape[2:])
    for side, part in zip(each, flat, strict=True):
        side.write(blocks, part)
    if contents.scales is not None:
        scales = contents.scales.reshape(flat.shape[:-1])
        for side, part in zip(each, scales, strict=True):
            side.write_scales(blocks, part)
    return state


BLOCK_IO = BlockIO(read, write, stored_bits)
