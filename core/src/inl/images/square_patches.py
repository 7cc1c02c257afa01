"""Images as squares of one size, each of which SigLIP encodes for itself.

Of Gemma 3 (one square, without pan and scan) and of Idefics3 (Laurençon et al., 2024)
and SmolVLM: tiles of the enlarged image, then the whole one. As the image processors of
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.errors import CheckpointError, RequestError
from inl.images.normalization import FILE, Normalization, edge, read_normalization
from inl.images.qwen_patches import Patches, in_squares

if TYPE_CHECKING:
    from numpy.typing import NDArray

HALVES: Final = (0.5, 0.5, 0.5)
BILINEAR: Final = Normalization(HALVES, HALVES, resample=2)
LANCZOS: Final = Normalization(HALVES, HALVES, resample=1)
MOST: Final = 4096
"""Pixels of the longest side of an image before it is cut."""
MAX_TILES: Final = 63
"""Most tiles of an image, beside the whole one."""
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class SquareSettings:
    """How an image becomes squares: :attr:`longest` is 0 for a single one."""

    patch_size: int
    merge_size: int
    side: int
    """Patches of a side of a square."""
    longest: int = 0
    """Pixels of the longest side of the image that is cut."""
    is_tagged: bool = False
    """Whether special tokens mark the row and column of each tile."""
    normalization: Normalization = BILINEAR

    @property
    def max_patches(self) -> int:
        """Patches of the largest image, in tiles and as a whole."""
        tiles = math.ceil(self.longest / (self.side * self.patch_size)) ** 2
        return (min(tiles, MAX_TILES) + 1) * self.side**2

    def grid_of(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Return the rows and columns of patches of all tiles of an image."""
        size = self.side * self.patch_size
        if not self.longest:
            return self.side, self.side
        rows, columns = (side // size for side in self._cut(height, width)[-1])
        if rows * columns > MAX_TILES:
            raise RequestError(
                f"{where}: found {rows * columns} tiles, accepts {MAX_TILES}"
            )
        return rows * self.side, columns * self.side

    def patches(self, pixels: NDArray[np.uint8], where: str) -> Patches:
        """Return the patches of an image [height, width, 3], in squares."""
        height, width = pixels.shape[:2]
        grid, size = self.grid_of(height, width, where), self.side * self.patch_size
        resized = self.normalization.resized
        tiles = []
        for sizes in self._cut(height, width) if self.longest else ():
            pixels = resized(pixels, *sizes)
        if grid != (self.side, self.side):
            tiles = [
                pixels[top : top + size, left : left + size]
                for top in range(0, pixels.shape[0], size)
                for left in range(0, pixels.shape[1], size)
            ]
        tiles.append(resized(pixels, size, size))
        one = self.side, self.side
        values = [
            in_squares(self.normalization.apply(tile), one, self.merge_size)
            for tile in tiles
        ]
        return Patches(np.concatenate(values).reshape(len(tiles) * self.side**2, -1),
                       grid)  # fmt: skip

    def pieces(self, grid: tuple[int, int]) -> tuple[int | str, ...]:
        """Return the features of each square, and the texts between them."""
        count = (self.side // self.merge_size) ** 2
        if not self.is_tagged:
            return (count,)
        rows, columns = (side // self.side for side in grid)
        if (rows, columns) == (1, 1):
            return AROUND + WHOLE, count, AROUND
        parts: list[int | str] = []
        for row in range(rows):
            before = "\n" if row else ""
            for column in range(columns):
                parts += [f"{before}{AROUND}<row_{row + 1}_col_{column + 1}>", count]
                before = ""
        return *parts, f"\n\n{AROUND}{WHOLE}", count, AROUND

    def _cut(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return two sizes that the image gets in turn; the last one is in tiles."""
        ratio, size = width / height, self.side * self.patch_size
        # Sides are rounded as in the processor: a pixel more or less moves a tile.
        if width >= height:
            width, height = self.longest, int(self.longest / ratio)
            height += height % 2
        else:
            height, width = self.longest, int(self.longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > MOST:
            height, width = max(int(MOST / ratio), 1), MOST
        elif height > width and height > MOST:
            height, width = MOST, max(int(MOST * ratio), 1)
        ratio, first = width / height, (height, width)
        if width >= height:
            width = math.ceil(width / size) * size
            height = math.ceil(int(width / ratio) / size) * size
        else:
            height = math.ceil(height / size) * size
            width = math.ceil(int(height * ratio) / size) * size
        return first, (max(height, size), max(width, size))


def read_square(fields: Mapping[str, Any], config: Mapping[str, Any]) -> SquareSettings:
    """Read settings of one square; raises :class:`CheckpointError`.

    fields: of ``preprocessor_config.json``, empty without one. config: of the encoder,
    whose sizes must be those of the processor.
    """
    patch, size = config["patch_size"], config["image_size"]
    if edge(fields, "size", size) != size or fields.get("do_pan_and_scan"):
        raise CheckpointError(
            f"{FILE}: found size {fields.get('size')!r:.80} and do_pan_and_scan "
            f"{fields.get('do_pan_and_scan')!r:.10}, accepted: {size} and false"
        )
    return SquareSettings(
        patch_size=patch,
        merge_size=config["merge_size"],
        side=size // patch,
        normalization=read_normalization(fields, BILINEAR),
    )


def read_tiles(fields: Mapping[str, Any], config: Mapping[str, Any]) -> SquareSettings:
    """Read settings of tiles as :func:`read_square`."""
    patch = config["patch_size"]
    size = edge(fields, "max_image_size", config["image_size"])
    if not fields.get("do_image_splitting", True):
        raise CheckpointError(
            f"{FILE}: do_image_splitting: found false, accepted: true"
        )
    if size % (patch * config["merge_size"]):
        raise CheckpointError(
            f"{FILE}: max_image_size: found {size}, expected a multiple of "
            f"{patch * config['merge_size']}, the side of a feature"
        )
    return SquareSettings(
        patch_size=patch,
        merge_size=config["merge_size"],
        side=size // patch,
        longest=edge(fields, "size", 4 * size),
        is_tagged=True,
        normalization=read_normalization(fields, LANCZOS),
    )
