"""Counters of finished programs, which kernels leave at 0."""

from __future__ import annotations

import torch


class Counters:
    """Zeroed int32 counters on each device, of the kernels of one engine.

    A kernel that raises counters resets them to 0 before it ends, so that all launches
    of a stream share them. Counters are allocated at first use, which precedes the
    capture of a graph, and never replaced, since graphs keep their addresses.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, int], torch.Tensor] = {}

    def on(self, place: torch.device, size: int) -> torch.Tensor:
        """Return the counters of a device: int32 [size]."""
        key = place, size
        if key not in self._known:
            self._known[key] = torch.zeros(size, dtype=torch.int32, device=place)
        return self._known[key]
