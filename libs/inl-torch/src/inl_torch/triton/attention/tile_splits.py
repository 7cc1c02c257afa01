"""Keys of tiles of queries, cut into items of about the same size.

A few new tokens after a long cached prefix are a few tiles over many keys, which would
leave most of the chip idle. The items of a step are assigned on the device, so that a
captured graph serves prefixes of any length: a tile has several items only where its
keys are more than one program's share of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.common import power

COLUMNS = tl.constexpr(6)

MIN_KEYS = 256
"""Fewest keys of an item of a tile that has several."""

MERGED_ROWS = 4
"""Rows of a tile that a program merges at a time."""

MERGED_SPLITS = 8
"""Splits that it merges at a time."""


class TileItems(NamedTuple):
    """Splits of all tiles; those of a tile follow each other."""

    entries: torch.Tensor
    """int32 [items, 6]: row (-1 for padding), first token, number of tokens (0 if
    unused), split, splits, index of the tile's first partial result. Only tiles of
    several splits have partial results."""
    parts: int
    """Most partial results."""


@triton.jit
def assign_tile_items(
    tiles: tensor, positions: tensor, entries: tensor, tile_count: tensor,
    spare: tensor, window: tensor, KEYS: tl.constexpr, MIN_TILES: tl.constexpr,
    TILES: tl.constexpr, COUNT: tl.constexpr,
) -> None:  # fmt: skip
    """Write :class:`TileItems` of ``tile_count`` tiles, at most ``spare`` more items.

    A ``window`` of 0 is none. With one spare item no tile is split.
    """
    tile = tl.arange(0, TILES)
    inside = tile < tile_count
    row = tl.load(tiles + tile * 3, mask=inside, other=-1)
    first = tl.load(tiles + tile * 3 + 1, mask=inside, other=0)
    queries = tl.load(tiles + tile * 3 + 2, mask=inside, other=0)
    is_used = queries > 0
    has_keys = is_used & (row >= 0)
    begin = tl.load(positions + first, mask=has_keys, other=0).to(tl.int32)
    keys = begin + queries
    keys = tl.where(window > 0, tl.minimum(keys, window + queries), keys)
    key_tiles = tl.where(has_keys, (keys + KEYS - 1) // KEYS, is_used.to(tl.int32))
    # At most tile_count + sum(key_tiles) / size items. Tiles of fewer than two shares
    # stay whole, since partial results take time as well.
    size = tl.maximum((tl.sum(key_tiles, 0) + spare - 1) // spare, MIN_TILES)
    splits = tl.maximum(key_tiles // size, is_used.to(tl.int32))
    item = tl.cumsum(splits, 0) - splits
    parts = tl.where(splits > 1, splits, 0)
    part = tl.cumsum(parts, 0) - parts
    for split in range(tl.max(splits, 0)):
        entry = entries + (item + split) * COLUMNS
        in_tile = split < splits
        tl.store(entry, row, mask=in_tile)
        tl.store(entry + 1, first, mask=in_tile)
        tl.store(entry + 2, queries, mask=in_tile)
        tl.store(entry + 3, tl.full((TILES,), split, tl.int32), mask=in_tile)
        tl.store(entry + 4, splits, mask=in_tile)
        tl.store(entry + 5, part, mask=in_tile)
    unused = tl.arange(0, COUNT)
    is_unused = (unused >= tl.sum(splits, 0)) & (unused < tile_count + spare)
    for column in tl.static_range(COLUMNS):
        entry = entries + unused * COLUMNS + column
        tl.store(entry, tl.zeros((COUNT,), tl.int32), mask=is_unused)


def split_tiles(
    tiles: torch.Tensor, positions: torch.Tensor, spare: int, *, keys: int,
    window: int | None,
) -> TileItems:  # fmt: skip
    """Cut the keys of each tile into items, ``spare`` more than tiles at most.

    tiles: int32 [tiles, 3], row (-1 for padding), first token, number of tokens.
    positions: [T]. keys: of a step of a program's loop.
    """
    count = tiles.shape[0] + spare
    shape = (count, COLUMNS.value)
    entries = torch.empty(shape, dtype=torch.int32, device=tiles.device)
    assign_tile_items[(1,)](
        tiles, positions, entries, tiles.shape[0], spare, window or 0, KEYS=keys,
        MIN_TILES=max(MIN_KEYS // keys, 1), TILES=power(tiles.shape[0]),
        COUNT=power(count), num_warps=4,
    )  # fmt: skip
    # The splits of a tile are no more than its shares, of which all tiles have at most
    # ``spare`` together.
    return TileItems(entries, spare)


@triton.jit
def combine_tiles(
    entries: tensor, split_acc: tensor, split_stats: tensor, out: tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    DIM: tl.constexpr, DIM_P: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the splits of a tile, weighted by their softmax sums.

    Each item of a tile merges ``ROWS`` of its rows, ``SPLITS`` at a time, and goes on
    behind those of the other items.
    """
    CHUNKS: tl.constexpr = (GROUP + LANES - 1) // LANES
    entry = entries + tl.program_id(1) * COLUMNS
    splits = tl.load(entry + 4)
    if splits <= 1:
        return
    first = tl.load(entry + 1).to(tl.int64)
    rows = tl.load(entry + 2) * LANES
    split, part = tl.load(entry + 3), tl.load(entry + 5)
    d = tl.arange(0, DIM_P)
    for start in range(split * ROWS, rows, splits * ROWS):
        m = start + tl.arange(0, ROWS)
        group_head = (tl.program_id(0) % CHUNKS) * LANES + m % LANES
        is_head = (m < rows) & (group_head < GROUP)
        m_max = tl.full((ROWS,), -1e30, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM_P), tl.float32)
        for begin in range(0, splits, SPLITS):
            each = begin + tl.arange(0, SPLITS)
            slot = (part + each).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
            cell = slot[:, None] * M + m[None, :]
            inside = (each < splits)[:, None] & is_head[None, :]
            m_i = tl.load(split_stats + cell * 2, mask=inside, other=-1e30)
            l_i = tl.load(split_stats + cell * 2 + 1, mask=inside, other=0)
            values = tl.load(
                split_acc + cell[:, :, None] * DIM_P + d[None, None, :],
                mask=inside[:, :, None], other=0,
            )  # fmt: skip
            m_new = tl.maximum(m_max, tl.max(m_i, 0))
            weight, rescale = tl.exp2(m_i - m_new[None, :]), tl.exp2(m_max - m_new)
            total = total * rescale + tl.sum(l_i * weight, 0)
            acc = acc * rescale[:, None] + tl.sum(values * weight[:, :, None], 0)
            m_max = m_new
        acc = acc / tl.where(total > 0, total, 1)[:, None]
        head = tl.program_id(0) // CHUNKS * GROUP + group_head
        cells = (first + m // LANES) * (KV_HEADS * GROUP) + head
        mask = is_head[:, None] & (d < DIM)[None, :]
        tl.store(out + cells[:, None] * DIM + d[None, :], acc, mask=mask)
