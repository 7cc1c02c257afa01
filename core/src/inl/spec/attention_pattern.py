"""Which keys a query sees: by position, and in tiles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

HIDDEN = -1e30
"""Score of a key that a query does not see."""


class Tiles(NamedTuple):
    """Of [tiles of queries, tiles of keys]."""

    wanted: NDArray[np.bool_]
    """Whether a query sees a key."""
    whole: NDArray[np.bool_]
    """Whether every query sees every key."""


class AttentionPattern(NamedTuple):
    """Which of ``keys`` keys each of ``length`` queries sees; keys start at 0."""

    length: int
    keys: int
    size: int
    """Queries and keys of a tile."""
    causal: bool = False
    window: int | None = None
    """Keys less than this far away are seen."""
    blocks: NDArray[np.bool_] | None = None
    """Tiles of which a key may be seen; ``None``: of all."""

    @property
    def offset(self) -> int:
        """Position of the first query; the last one is at the last key if causal."""
        return self.keys - self.length if self.causal else 0

    @property
    def rows(self) -> int:
        """Tiles of queries."""
        return -(-self.length // self.size)

    @property
    def columns(self) -> int:
        """Tiles of keys."""
        return -(-self.keys // self.size)

    @property
    def distances(self) -> tuple[float, float]:
        """Smallest and largest position of a query after a key that it sees."""
        most = math.inf if self.window is None else self.window - 1
        return (0 if self.causal else -most), most

    def seen(self, queries: Any, keys: Any) -> Any:
        """Return whether a query sees a key but for ``blocks``; ``None``: it does.

        queries, keys: whole numbers from 0 in arrays of a framework, which broadcast.
        """
        least, most = self.distances
        distance = queries + self.offset - keys
        if least == -math.inf:
            return None
        if most == math.inf:
            return distance >= least
        return (distance >= least) & (distance <= most)

    def tiles(self) -> Tiles:
        """Return which tiles have to be computed, and which without a mask."""
        least, most = self.distances
        starts = np.arange(self.rows) * self.size, np.arange(self.columns) * self.size
        first, key = starts[0][:, None] + self.offset, starts[1]
        last = np.minimum(first + self.size, self.length + self.offset) - 1
        nearest = first - np.minimum(key + self.size, self.keys) + 1
        wanted = (last - key >= least) & (nearest <= most)
        if self.blocks is not None:
            wanted &= self.blocks
        return Tiles(wanted, (nearest >= least) & (last - key <= most))
