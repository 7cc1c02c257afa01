"""Counters by which programs of a kernel wait for earlier ones."""

from __future__ import annotations

import torch


class Counters:
    """A counter for each number of programs and device, of the kernels of one engine.

    Each program of a kernel adds 1, so that a counter is a multiple of its number of
    programs between kernels, and all launches of a stream share it. Counters are
    allocated at first use, which precedes the capture of a graph, and never replaced,
    since graphs keep their addresses.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, *tuple[int, ...]], torch.Tensor] = {}

    def on(self, place: torch.device, programs: int) -> torch.Tensor:
        """Return the counter of launches with this number of programs: int64 [1]."""
        key = place, programs
        if key not in self._known:
            self._known[key] = torch.zeros(1, dtype=torch.int64, device=place)
        return self._known[key]

    def each(self, place: torch.device, tiles: int, parts: int) -> torch.Tensor:
        """Return a counter for each of ``tiles``, of launches that divide each between
        ``parts`` programs: int32 [tiles], multiples of ``parts`` between kernels.
        """
        key = place, tiles, parts
        if key not in self._known:
            self._known[key] = torch.zeros(tiles, dtype=torch.int32, device=place)
        return self._known[key]
