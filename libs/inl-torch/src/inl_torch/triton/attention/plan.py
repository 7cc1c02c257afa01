"""Which program attends which tokens: worked out once a step, on the device."""

from __future__ import annotations

import torch

from inl.spec.step import Step


class Work:
    """Lists of a step's work, each made for the first layer that asks."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._tiles: dict[tuple[int, bool], torch.Tensor] = {}
        self._sizes: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def singles(self) -> torch.Tensor:
        """[1] leading rows of one token each, which attend by themselves."""
        return self._split()[0]

    def tiles(self, queries: int, *, every: bool = False) -> torch.Tensor:
        """All other tokens, or ``every`` one, int32 [tiles, 3]: row, first, tokens.

        Padding is a row -1, and tiles of nobody, at the end, have no tokens. A row's
        last tile, which sees most keys, comes first.
        """
        key = queries, every
        if key not in self._tiles:
            self._tiles[key] = self._list(queries, every=every)
        return self._tiles[key]

    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sizes is None:
            starts = self._step.starts
            sizes = starts[1:] - starts[:-1]
            alone = (sizes == 1).long().cumprod(0)
            self._sizes = alone.sum(0, keepdim=True), alone
        return self._sizes

    def _list(self, queries: int, *, every: bool) -> torch.Tensor:
        step = self._step
        tokens, rows = step.positions.shape[0], step.lengths.shape[0]
        # What follows the last row is padding, as one more row.
        bounds = torch.nn.functional.pad(step.starts.long(), (0, 1), value=tokens)
        sizes = bounds[1:] - bounds[:-1]
        if not every:
            sizes[:-1] *= 1 - self._split()[1]
        counts = (sizes + queries - 1) // queries
        ends = counts.cumsum(0)
        most = -(-tokens // queries) + rows + 1
        place = ends[-1] - 1 - torch.arange(most, device=bounds.device)
        row = torch.searchsorted(ends, place, right=True).clamp(max=rows)
        first = bounds[row] + (place - (ends - counts)[row]) * queries
        count = (bounds[row + 1] - first).clamp(0, queries).masked_fill(place < 0, 0)
        return torch.stack((row.masked_fill(row == rows, -1), first, count), 1).int()


def plan(step: Step, *, block_size: int) -> Work:  # noqa: ARG001
    """What the layers of a step share."""
    return Work(step)
