"""Numbers that differ from chip to chip; a plugin brings those of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inl_torch.triton.common import power

EARLY_ROWS = 32
"""Most rows of a step whose kernels start early."""

WIDE = 2048
"""Most columns of a matrix that several rows multiply by programs of ours; of a wider
one the device's own library made more, in whole steps."""

AT_ONCE = 128 << 10
"""Most bytes of rows and weights that a program of several rows takes at once."""

HELD = 1 << 14
"""Most elements that it norms."""

IN_FLIGHT = 96 << 10
"""Bytes that a program of several rows has on their way, about."""

MOST_STAGES = 5


def padded(tokens: int) -> int:
    """Rows of the matrix units' tile that holds so many."""
    return max(power(tokens), 8)


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


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernels of a decoding step are cut."""

    early: bool = False
    """Whether a kernel may start before the one ahead of it ends, and read weights
    meanwhile (programmatic dependent launch, compute capability 9.0)."""
    processors: int = 132
    """Multiprocessors of the chip."""
    tiles: Mapping[tuple[str, int, int], Tile] = field(default_factory=dict)
    """(kind of product, rows, columns of the matrix) -> what was measured best; the
    kind of a product of several rows ends in their number, padded: "norm x16"."""
    chosen: Mapping[str, Tile] = field(default_factory=dict)
    """Kind of product, whatever its rows -> tile of every matrix: what is being tried,
    or was measured for a kernel of its own."""
    attend: Attend | None = None
    """Likewise; a rule if none."""
    few_rows: int = 1
    """Most rows that share one reading of the weights in programs of ours; the device's
    own library makes more of the others. AMD's compiler spills in the programs of
    several."""
    most_outputs: int = 1 << 13
    """Most rows of a matrix that several rows multiply by programs of ours."""
    normed_rows: int = 16
    """Most rows whose product computes their norm by itself; that of more, and of
    wider ones, has a launch of its own."""
    shared_bytes: int = 64 << 10
    """Shared memory that a program may have."""
    filters: bool = False
    """Whether tokens are chosen with penalties and filters by programs of ours."""

    def tile(self, kind: str, n: int, k: int, tokens: int = 1) -> Tile:
        """What is known for this product, or else a rule; ``tokens`` are padded."""
        name = f"{kind} x{tokens}" if tokens > 1 else kind
        found = self.chosen.get(kind) or self.tiles.get((name, n, k))
        if found is not None:
            return found
        if tokens > 1:
            return self._few(kind, n, k, tokens)
        rows = min(max(power(n // (8 * self.processors)), 1), 4)
        if k > WIDE:
            return Tile(2, 2048, 8)
        return Tile(rows, max(power(k), 16), 2)

    def _few(self, kind: str, n: int, k: int, tokens: int) -> Tile:
        rows = 16 if n <= 4096 else 32
        if tokens > self.normed_rows and kind != "plain":
            # After a norm of its own, small programs: more of them run at once.
            return Tile(rows, 128, 2)
        whole = self._fits(power(k), tokens, 2 * rows if kind == "gated" else rows)
        part = 256 if self.shared_bytes > AT_ONCE else 128
        return Tile(rows, max(power(k), 64) if whole else part, 4)

    def _fits(self, columns: int, tokens: int, rows: int) -> bool:
        return 2 * columns * (tokens + rows) <= min(self.shared_bytes, AT_ONCE)

    def stages(self, tile: Tile, tokens: int, *, gated: bool) -> int:
        """Steps of a program of several rows that are on their way at once."""
        step = 2 * tile.columns * (tokens + tile.rows * (2 if gated else 1))
        room = min(self.shared_bytes, IN_FLIGHT)
        return min(max(room // step, 1), MOST_STAGES)

    def norms(self, tokens: int, columns: int) -> bool:
        """Whether the product of so many rows computes their norm by itself."""
        if tokens == 1:
            return True
        held, whole = padded(tokens), power(columns)
        fits = held * whole <= HELD and self._fits(whole, held, 32)
        return tokens <= self.normed_rows and columns <= WIDE and fits

    def starts_early(self, tokens: int) -> bool:
        """Whether the kernels of a step of so many tokens do.

        Larger ones hold so much of a multiprocessor while they wait that the kernel
        ahead of them loses more than they win.
        """
        return self.early and tokens <= EARLY_ROWS

    def launch(self, tokens: int) -> dict[str, Any]:
        """Options of every launch in a step of so many tokens."""
        return {"launch_pdl": True} if self.starts_early(tokens) else {}
