"""Work lists of the attention kernels, computed once per step on the device."""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.step import Step
from inl_torch.triton.attention.row_splits import Items, split_rows


class Work:
    """Work lists of a step, each computed at its first use by a layer."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._tiles: dict[tuple[int, bool], torch.Tensor] = {}
        self._sizes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._items: dict[tuple[Any, ...], Items] = {}

    @property
    def singles(self) -> torch.Tensor:
        """[1] number of leading rows of one token each."""
        return self._split()[0]

    def tiles(self, queries: int, *, all_tokens: bool = False) -> torch.Tensor:
        """Tiles of all other tokens, or of ``all_tokens``: int32 [tiles, 3].

        Columns: row (-1 for padding), first token, number of tokens. Unused tiles, at
        the end, have no tokens. The last tile of a row, which has the most keys, comes
        first.
        """
        key = queries, all_tokens
        if key not in self._tiles:
            self._tiles[key] = self._make_tiles(queries, all_tokens=all_tokens)
        return self._tiles[key]

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

    def _make_tiles(self, queries: int, *, all_tokens: bool) -> torch.Tensor:
        step = self._step
        tokens, rows = step.positions.shape[0], step.lengths.shape[0]
        # The padding after the last row is one more row.
        bounds = torch.nn.functional.pad(step.starts.long(), (0, 1), value=tokens)
        sizes = bounds[1:] - bounds[:-1]
        if not all_tokens:
            sizes[:-1] *= 1 - self._split()[1]
        counts = (sizes + queries - 1) // queries
        ends = counts.cumsum(0)
        max_tiles = -(-tokens // queries) + rows + 1
        index = ends[-1] - 1 - torch.arange(max_tiles, device=bounds.device)
        row = torch.searchsorted(ends, index, right=True).clamp(max=rows)
        first = bounds[row] + (index - (ends - counts)[row]) * queries
        count = (bounds[row + 1] - first).clamp(0, queries).masked_fill(index < 0, 0)
        return torch.stack((row.masked_fill(row == rows, -1), first, count), 1).int()


def plan(step: Step, *, block_size: int) -> Work:  # noqa: ARG001
    """Make the work lists, which the layers of a step share."""
    return Work(step)
