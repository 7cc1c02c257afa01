"""Launch parameters of the Triton kernels that depend on the chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inl_torch.triton.common import power

PDL_MAX_ROWS = 32
"""Most rows of a step whose kernels use programmatic dependent launch."""

MAX_COLUMNS = 2048
"""Most columns of a matrix whose tiles a product of several rows loads at once. Wider
ones are streamed, or left to the device's library."""

MAX_TILE_BYTES = 128 << 10
"""Most bytes of activations and weights in one tile of a product of several rows."""

MAX_NORM_ELEMENTS = 1 << 14
"""Most elements that such a product normalizes itself."""

PIPELINE_BYTES = 96 << 10
"""Bytes in flight of a program for several rows, about."""

MAX_STAGES = 5


def padded_rows(tokens: int) -> int:
    """Round a number of rows up to a tile of the matrix units."""
    return max(power(tokens), 8)


class Tile(NamedTuple):
    """Tile of a weight matrix that one program loads at a time."""

    rows: int
    columns: int
    warps: int


class AttentionConfig(NamedTuple):
    """Launch parameters of the attention of a decoding step."""

    keys: int
    """Keys per tile."""
    waves: int
    """Target number of programs per multiprocessor."""
    warps: int
    stages: int


class AttentionTile(NamedTuple):
    """Launch parameters of a tile of attention, for chips with few registers."""

    rows: int
    """Queries times heads; of prompts only."""
    keys: int
    """Keys per loop step."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters of the kernels of a decoding step on one chip."""

    lanes: int = 32
    """Threads of a warp; 64 on AMD's CDNA chips."""

    pdl: bool = False
    """Whether to use programmatic dependent launch (compute capability 9.0): a kernel
    starts, and reads weights, before the previous one ends."""
    processors: int = 132
    """Number of multiprocessors."""
    tiles: Mapping[tuple[str, int, int], Tile] = field(default_factory=dict)
    """(kind of product, rows, columns of the matrix) -> fastest measured tile. The kind
    of a product of several rows ends in their padded number: "norm x16"."""
    overrides: Mapping[str, Tile] = field(default_factory=dict)
    """Kind of product -> tile for all shapes, of a configuration under test or of one
    that was measured for a single kernel."""
    attend: AttentionConfig | None = None
    """Likewise for attention; ``None`` selects by rule."""
    attention: Mapping[tuple[str, int, bool], AttentionTile] = field(
        default_factory=dict
    )
    """(kind of attention, head size, whether float32) -> tile; all others by rule. The
    kinds are "decode" and "single", of one query per row, and "prompt"; the head size
    is a power of two, at least 64."""
    max_head_dim: int = 256
    """Largest head size of attention in Triton."""
    long_row_tokens: int = 0
    """Fewest new tokens of a row whose attention gathers its keys first, for chips
    whose copy engine loads tiles; 0 is none."""
    tile_waves: int = 2
    """Programs per multiprocessor up to which the keys of tiles are split; 0 is never,
    for chips on which splits were neither compiled nor measured."""
    max_rows: int = 1
    """Most rows of a Triton product; for more rows the device's library is faster."""
    max_outputs: int = 1 << 13
    """Likewise, most rows of a matrix."""
    max_streamed_rows: int = 0
    """Most rows for which Triton multiplies matrices of more outputs or columns."""
    max_norm_rows: int = 16
    """Most rows whose product also computes their norm; the norm of more, or of wider,
    rows is a separate launch."""
    shared_bytes: int = 64 << 10
    """Most shared memory of a program."""
    filters: bool = False
    """Whether sampling with penalties and filters, and scores, use Triton."""
    fixed_groups: bool = False
    """Whether its sums are grouped in the same way for any number of rows."""

    def attention_tile(
        self, kind: str, dim: int, *, is_float32: bool
    ) -> AttentionTile | None:
        """Return the attention tile of the chip's table, if it has one."""
        return self.attention.get((kind, max(power(dim), 64), is_float32))

    def tile(self, kind: str, n: int, k: int, tokens: int = 1) -> Tile:
        """Return the tile of a product, measured or by rule. ``tokens``: padded
        rows.
        """
        name = f"{kind} x{tokens}" if tokens > 1 else kind
        known = self.overrides.get(kind) or self.tiles.get((name, n, k))
        if known is not None:
            return known
        if tokens > 1:
            return self._multi_row_tile(kind, n, k, tokens)
        rows = min(max(power(n // (8 * self.processors)), 1), 4)
        if k > MAX_COLUMNS:
            return Tile(2, 2048, 8)
        return Tile(rows, max(power(k), 16), 2)

    def _multi_row_tile(self, kind: str, n: int, k: int, tokens: int) -> Tile:
        rows = 16 if n <= 4096 else 32
        if tokens > self.max_norm_rows and kind != "plain":
            # After a separate norm, use small programs, of which more run concurrently.
            return Tile(rows, 128, 2)
        one_tile = self._fits(power(k), tokens, 2 * rows if kind == "gated" else rows)
        part = 256 if self.shared_bytes > MAX_TILE_BYTES else 128
        return Tile(rows, max(power(k), 64) if one_tile else part, 4)

    def _fits(self, columns: int, tokens: int, rows: int) -> bool:
        return 2 * columns * (tokens + rows) <= min(self.shared_bytes, MAX_TILE_BYTES)

    def stages(self, tile: Tile, tokens: int, *, gated: bool) -> int:
        """Return the pipeline stages of a product of several rows."""
        step = 2 * tile.columns * (tokens + tile.rows * (2 if gated else 1))
        available = min(self.shared_bytes, PIPELINE_BYTES)
        return min(max(available // step, 1), MAX_STAGES)

    def fitted_stages(self, stages: int, step: int) -> int:
        """Return the stages of a pipeline that fit the shared memory.

        stages: as many as are fastest; step: bytes of one, of which one less is held.
        """
        return min(stages, 1 + self.shared_bytes // step)

    def fuses_norm(self, tokens: int, columns: int) -> bool:
        """Whether a product of ``tokens`` rows also computes their norm."""
        if tokens == 1:
            return True
        rows, width = padded_rows(tokens), power(columns)
        fits = rows * width <= MAX_NORM_ELEMENTS and self._fits(width, rows, 32)
        return tokens <= self.max_norm_rows and columns <= MAX_COLUMNS and fits

    def uses_pdl(self, tokens: int) -> bool:
        """Whether a step of ``tokens`` tokens uses programmatic dependent launch.

        In larger steps, waiting kernels occupy so much of a multiprocessor that the
        previous kernel loses more than they gain.
        """
        return self.pdl and tokens <= PDL_MAX_ROWS

    def launch(self, tokens: int) -> dict[str, Any]:
        """Return the launch options of a step of ``tokens`` tokens."""
        return {"launch_pdl": True} if self.uses_pdl(tokens) else {}
