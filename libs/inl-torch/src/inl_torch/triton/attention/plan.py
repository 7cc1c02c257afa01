"""Work lists of the attention kernels, computed once per step on the device."""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.step import Step
from inl_torch.triton.attention.long_rows import LongRowLimits, LongRows
from inl_torch.triton.attention.prompt import KEYS, TILE_TOKENS
from inl_torch.triton.attention.row_splits import Items, split_rows
from inl_torch.triton.attention.tile_splits import TileItems, split_tiles


class Work:
    """Work lists of a step, each computed at its first use by a layer."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._tiles: dict[tuple[Any, ...], torch.Tensor] = {}
        self._tile_items: dict[tuple[Any, ...], TileItems] = {}
        self._sizes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._items: dict[tuple[Any, ...], Items] = {}
        self._long_rows: dict[LongRowLimits, LongRows] = {}

    @property
    def singles(self) -> torch.Tensor:
        """[1] number of leading rows of one token each."""
        return self._split()[0]

    def tiles(
        self, queries: int, *, all_tokens: bool = False,
        without: LongRowLimits | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Tiles of all other tokens, or of ``all_tokens``: int32 [tiles, 3].

        without: limits of long rows, which are left out.

        Columns: row (-1 for padding), first token, number of tokens. Unused tiles, at
        the end, have no tokens. The last tile of a row, which has the most keys, comes
        first.
        """
        key = queries, all_tokens, without
        if key not in self._tiles:
            sizes = self._row_sizes()
            if not all_tokens:
                sizes[:-1] *= 1 - self._split()[1]
            if without is not None:
                sizes[:-1] *= ~self.long_rows(without).is_long
            self._tiles[key] = self._make_tiles(queries, sizes, len(sizes))
        return self._tiles[key]

    def tile_items(
        self, queries: int, spare: int, *, keys: int, window: int | None
    ) -> TileItems:
        """Items of :meth:`tiles`, as of :func:`split_tiles`."""
        key = queries, spare, keys, window
        if key not in self._tile_items:
            self._tile_items[key] = split_tiles(
                self.tiles(queries), self._step.positions, spare, keys=keys,
                window=window,
            )  # fmt: skip
        return self._tile_items[key]

    def long_rows(self, limits: LongRowLimits) -> LongRows:
        """Long rows, up to the first one whose keys do not fit the buffer."""
        if limits not in self._long_rows:
            self._long_rows[limits] = self._find_long_rows(limits)
        return self._long_rows[limits]

    def items(
        self, tokens: int, spare: int, *, keys: int, window: int | None, mixed: bool
    ) -> Items:
        """Items of the first ``tokens`` tokens; in a mixed step of :attr:`singles`."""
        key = tokens, spare, keys, window, mixed
        if key not in self._items:
            used = self.singles if mixed else self._step.used_counts[2:]
            self._items[key] = split_rows(
                self._step.positions[:tokens], used, spare, keys=keys, window=window,
                used_only=mixed,
            )  # fmt: skip
        return self._items[key]

    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sizes is None:
            starts = self._step.starts
            sizes = starts[1:] - starts[:-1]
            is_single = (sizes == 1).long().cumprod(0)
            self._sizes = is_single.sum(0, keepdim=True), is_single
        return self._sizes

    def _find_long_rows(self, limits: LongRowLimits) -> LongRows:
        sizes, lengths = self._row_sizes(), self._step.lengths.long()
        is_long = sizes[:-1] >= limits.tokens
        counts = (lengths + KEYS - 1) // KEYS * is_long
        ends = counts.cumsum(0)
        is_long &= ends <= limits.key_tiles
        firsts, tile = ends - counts, torch.arange(limits.key_tiles, device=ends.device)
        row = torch.searchsorted(ends, tile, right=True).clamp(max=len(ends) - 1)
        is_used = is_long[row] & (tile < ends[-1])
        key_tiles = row.masked_fill(~is_used, -1), (tile - firsts[row]) * KEYS
        sizes = torch.nn.functional.pad(sizes[:-1] * is_long, (0, 1))
        return LongRows(
            is_long, firsts.int(), torch.stack(key_tiles, 1).int(),
            self._make_tiles(TILE_TOKENS, sizes, limits.rows),
        )  # fmt: skip

    def _row_sizes(self) -> torch.Tensor:
        """Numbers of tokens of each row, and of padding, as one more row: [R + 1]."""
        return self._bounds().diff()

    def _bounds(self) -> torch.Tensor:
        tokens, starts = self._step.positions.shape[0], self._step.starts.long()
        return torch.nn.functional.pad(starts, (0, 1), value=tokens)

    def _make_tiles(self, queries: int, sizes: torch.Tensor, most: int) -> torch.Tensor:
        """Tiles of ``sizes`` tokens of each row, of which at most ``most`` have any."""
        bounds, rows = self._bounds(), len(sizes) - 1
        counts = (sizes + queries - 1) // queries
        ends = counts.cumsum(0)
        max_tiles = self._step.positions.shape[0] // queries + most
        index = ends[-1] - 1 - torch.arange(max_tiles, device=bounds.device)
        row = torch.searchsorted(ends, index, right=True).clamp(max=rows)
        first = bounds[row] + (index - (ends - counts)[row]) * queries
        count = (bounds[row + 1] - first).clamp(0, queries).masked_fill(index < 0, 0)
        return torch.stack((row.masked_fill(row == rows, -1), first, count), 1).int()


def plan(step: Step, *, block_size: int) -> Work:  # noqa: ARG001
    """Make the work lists, which the layers of a step share."""
    return Work(step)
