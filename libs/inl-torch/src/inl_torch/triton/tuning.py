"""Numbers that differ from chip to chip; a plugin brings those of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inl_torch.triton.common import power

TURNS = 8
"""Most rows that take turns with a tile of weights."""


class Tile(NamedTuple):
    """Part of a weight matrix that one program takes at once."""

    rows: int
    columns: int
    warps: int


class Attend(NamedTuple):
    """How the attention of a decoding step is cut."""

    keys: int
    """Keys of a tile."""
    waves: int
    """Programs wanted for each multiprocessor."""
    warps: int
    stages: int


IN_TURNS = " in turns"
"""Ends the kind of a product of several rows."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernels of a decoding step are cut."""

    early: bool = False
    """Whether a kernel may start before the one ahead of it ends, and read weights
    meanwhile (programmatic dependent launch, compute capability 9.0)."""
    processors: int = 132
    """Multiprocessors of the chip."""
    tiles: Mapping[tuple[str, int, int], Tile] = field(default_factory=dict)
    """(kind of product, rows, columns of the matrix) -> what was measured best."""
    chosen: Mapping[str, Tile] = field(default_factory=dict)
    """Kind of product, whatever its rows -> tile of every matrix: what is being tried,
    or was measured for a kernel of its own."""
    attend: Attend | None = None
    """Likewise; a rule if none."""
    shared_elements: int = 1 << 22
    """Largest matrix, in elements, with which a few rows take turns; of a larger one
    the device's own library makes more."""

    def tile(self, kind: str, n: int, k: int) -> Tile:
        """What is known for this product, or else a rule."""
        found = self.chosen.get(kind.partition(" ")[0])
        found = found or self.tiles.get((kind, n, k))
        if found is not None:
            return found
        if kind.endswith(IN_TURNS):
            return Tile(1, max(power(k), 16), 1 if k <= 1024 else 2)
        rows = min(max(power(n // (8 * self.processors)), 1), 4)
        if k > 2048:
            return Tile(rows, 512, 4)
        return Tile(rows, max(power(k), 16), 2)

    def starts_early(self, tokens: int) -> bool:
        """Whether the kernels of a step of so many tokens do.

        Larger ones hold so much of a multiprocessor while they wait that the kernel
        ahead of them loses more than they win.
        """
        return self.early and tokens <= TURNS

    def launch(self, tokens: int) -> dict[str, Any]:
        """Options of every launch in a step of so many tokens."""
        return {"launch_pdl": True} if self.starts_early(tokens) else {}
