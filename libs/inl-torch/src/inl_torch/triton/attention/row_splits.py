"""Keys of decoding rows of uneven length, cut into items of about the same size.

One program per row and head would leave most of the chip idle while the longest row is
computed. The items of a step are assigned on the device, so that a captured graph
serves rows of any length: long rows get many items and short ones a single item.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.common import power


class Items(NamedTuple):
    """Splits of all tokens, and padding; those of a token follow each other."""

    entries: torch.Tensor
    """int32 [items, 4]: token, split, splits of the token, its first item. Padding has
    a split that does not exist, of token 0."""
    tokens: torch.Tensor
    """int32 [T, 2]: splits of the token, its first item."""


@triton.jit
def assign_items(
    positions: tensor, used: tensor, entries: tensor, firsts: tensor, tokens: tensor,
    count: tensor, window: tensor, KEYS: tl.constexpr, MIN_TILES: tl.constexpr,
    TOKENS: tl.constexpr, COUNT: tl.constexpr, USED_ONLY: tl.constexpr,
) -> None:  # fmt: skip
    """Write :class:`Items` of the first ``used`` tokens, and one of each other token
    unless ``USED_ONLY``.

    ``count`` items must be more than ``tokens``; a ``window`` of 0 is none.
    """
    token = tl.arange(0, TOKENS)
    is_used = token < tl.load(used)
    keys = tl.load(positions + token, mask=is_used & (token < tokens), other=0)
    keys = keys.to(tl.int32) + 1
    keys = tl.where(window > 0, tl.minimum(keys, window), keys)
    tiles = tl.where(is_used, (keys + KEYS - 1) // KEYS, 0)
    # At most tokens + sum(tiles) / size <= count items.
    spare = count - tokens
    size = tl.maximum((tl.sum(tiles, 0) + spare - 1) // spare, MIN_TILES)
    splits = (tiles + size - 1) // size
    if not USED_ONLY:
        splits = tl.maximum(splits, 1)
    splits = tl.where(token < tokens, splits, 0)
    ends = tl.cumsum(splits, 0)
    first = ends - splits
    tl.store(firsts + token * 2, splits, mask=token < tokens)
    tl.store(firsts + token * 2 + 1, first, mask=token < tokens)
    for split in range(tl.max(splits, 0)):
        entry = entries + (first + split) * 4
        inside = split < splits
        tl.store(entry, token, mask=inside)
        tl.store(entry + 1, tl.full((TOKENS,), split, tl.int32), mask=inside)
        tl.store(entry + 2, splits, mask=inside)
        tl.store(entry + 3, first, mask=inside)
    padding = tl.arange(0, COUNT)
    entry = entries + padding * 4
    inside = (padding >= tl.sum(splits, 0)) & (padding < count)
    zeros = tl.zeros((COUNT,), tl.int32)
    tl.store(entry, zeros, mask=inside)
    tl.store(entry + 1, zeros + 1, mask=inside)
    tl.store(entry + 2, zeros + 1, mask=inside)
    tl.store(entry + 3, zeros, mask=inside)


def split_rows(
    positions: torch.Tensor, used: torch.Tensor, spare: int, *, keys: int,
    window: int | None, min_tiles: int = 1, used_only: bool = False,
) -> Items:  # fmt: skip
    """Cut the keys of each token into items, ``spare`` more than tokens.

    positions: [T] int32. used: [1] number of leading tokens that are none of padding;
    if ``used_only``, the others have no items. keys: of a tile. min_tiles: fewest tiles
    of an item of a token that has several.
    """
    tokens, place = positions.shape[0], positions.device
    count = tokens + spare
    items = Items(
        torch.empty((count, 4), dtype=torch.int32, device=place),
        torch.empty((tokens, 2), dtype=torch.int32, device=place),
    )
    assign_items[(1,)](
        positions, used, *items, tokens, count, window or 0, KEYS=keys,
        MIN_TILES=min_tiles, TOKENS=power(tokens), COUNT=power(count),
        USED_ONLY=used_only, num_warps=4,
    )  # fmt: skip
    return items


class Made(NamedTuple):
    """Items, and whether the previous kernel makes them."""

    items: Items
    is_new: bool


class DecodeWork:
    """What the layers of a decoding step share: counters, and items of uneven rows."""

    def __init__(self, positions: torch.Tensor, used: torch.Tensor, heads: int) -> None:
        shape = (positions.shape[0], heads)
        self.counters = torch.zeros(shape, dtype=torch.int32, device=positions.device)
        """Finished splits, int32 [T, heads], which every layer resets to 0."""
        self._positions, self._used = positions, used
        self._items: dict[tuple[int, int, int | None, int], Items] = {}

    def items(self, spare: int, keys: int, window: int | None, min_tiles: int) -> Made:
        """Return the items of :func:`split_rows`, made at their first use."""
        key = spare, keys, window, min_tiles
        is_new = key not in self._items
        if is_new:
            self._items[key] = split_rows(
                self._positions, self._used, spare, keys=keys, window=window,
                min_tiles=min_tiles,
            )  # fmt: skip
        return Made(self._items[key], is_new)
