"""Images as tiles of Llama 4: on the canvas of tiles that fits best, then as a whole.

As the image processor of transformers, which resizes 8-bit pixels with torch and
normalizes them in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.dtypes import rounded
from inl.errors import CheckpointError
from inl.images.fixed_point import resized
from inl.images.normalization import FILE, Normalization, edge, read_normalization
from inl.images.qwen_patches import Patches, in_squares
from inl.images.square_patches import BILINEAR

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_TILES: Final = 16
"""Default tiles of an image, beside the whole one."""
MAX_TILES: Final = 63
BEGIN, WHOLE, END = "<|image_start|>", "<|image|>", "<|image_end|>"
NEXT, ROW_END = "<|tile_x_separator|>", "<|tile_y_separator|>"


@dataclass(frozen=True, slots=True)
class TileSettings:
    """Fields of ``preprocessor_config.json``, and sizes of the encoder."""

    patch_size: int
    merge_size: int
    side: int
    """Patches of a side of a tile."""
    most: int = MOST_TILES
    """Tiles of an image, beside the whole one."""
    largest: bool = False
    """Whether small images are enlarged as far as tiles allow."""
    normalization: Normalization = BILINEAR

    @property
    def max_patches(self) -> int:
        """Patches of the largest image, in tiles and as a whole."""
        return (self.most + 1) * self.side**2

    @property
    def size(self) -> int:
        """Pixels of a side of a tile."""
        return self.side * self.patch_size

    def grid_of(self, height: int, width: int, _where: str) -> tuple[int, int]:
        """Return the rows and columns of patches of all tiles of an image."""
        rows, columns = self._canvas(height, width)
        return rows * self.side, columns * self.side

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles on which an image is largest.

        Scales are compared in float32, whose rounding decides between canvases.
        """
        canvases = np.array([
            (rows, columns)
            for rows in range(1, self.most + 1)
            for columns in range(1, self.most // rows + 1)
        ])  # fmt: skip
        sides = (canvases * self.size).astype(np.float32)
        scales = np.minimum(
            sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width)
        )
        if (enlarged := scales[scales >= 1]).size:
            best = enlarged.max() if self.largest else enlarged.min()
        else:
            best = scales.max()
        found = canvases[scales == best]
        rows, columns = found[np.argmin(found.prod(1))]
        return int(rows), int(columns)

    def _fitted(
        self, height: int, width: int, canvas: tuple[int, int]
    ) -> tuple[int, int]:
        """Return the size of an image on its canvas, in its proportions."""
        sides: list[Any] = [np.float32(side * self.size) for side in canvas]
        if not self.largest:
            # An image is enlarged to a tile at most. What is a size of the canvas is
            # computed with in float32, and another one in float64.
            sides = [
                most if max(length, self.size) > most else float(max(length, self.size))
                for length, most in zip((height, width), sides, strict=True)
            ]
        by_height, by_width = sides[0] / height, sides[1] / width
        if by_width < by_height:
            high, wide = min(math.floor(height * by_width), int(sides[0])), sides[1]
        else:
            high, wide = sides[0], min(math.floor(width * by_height), int(sides[1]))
        return max(int(high), 1), max(int(wide), 1)

    def patches(self, pixels: NDArray[np.uint8], where: str) -> Patches:
        """Return the patches of an image [height, width, 3], in squares."""
        height, width = pixels.shape[:2]
        grid, size = self.grid_of(height, width, where), self.size
        canvas = grid[0] // self.side, grid[1] // self.side
        fitted = resized(pixels, *self._fitted(height, width, canvas))
        whole = np.zeros((canvas[0] * size, canvas[1] * size, 3), np.uint8)
        whole[: fitted.shape[0], : fitted.shape[1]] = fitted
        tiles = [
            whole[top : top + size, left : left + size]
            for top in range(0, whole.shape[0], size)
            for left in range(0, whole.shape[1], size)
        ]
        if len(tiles) > 1:
            tiles.append(resized(pixels, size, size))
        one = self.side, self.side
        values = [in_squares(self._normal(tile), one, self.merge_size)
                  for tile in tiles]  # fmt: skip
        return Patches(np.concatenate(values).reshape(len(tiles) * self.side**2, -1),
                       grid)  # fmt: skip

    def _normal(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return [3, height, width] of pixels, rounded to bfloat16 at each step."""

        def half(x: Any) -> NDArray[np.float32]:
            return rounded(np.asarray(x, np.float32), "bfloat16")

        own = self.normalization
        scaled = half(pixels.astype(np.float32) * np.float32(own.rescale))
        normal = half(half(scaled - half(own.mean)) / half(own.std))
        return normal.transpose(2, 0, 1)

    def pieces(self, grid: tuple[int, int]) -> tuple[int | str, ...]:
        """Return the features of each tile, and the texts between them."""
        count = (self.side // self.merge_size) ** 2
        rows, columns = (side // self.side for side in grid)
        if (rows, columns) == (1, 1):
            return BEGIN + WHOLE, count, END
        row = (count, *(NEXT, count) * (columns - 1))
        return BEGIN, *(*row, ROW_END) * (rows - 1), *row, ROW_END + WHOLE, count, END


def read_settings(fields: Mapping[str, Any], config: Mapping[str, Any]) -> TileSettings:
    """Read settings; raises :class:`CheckpointError`.

    fields: of ``preprocessor_config.json``, empty without one. config: of the encoder,
    whose sizes must be those of the processor.
    """
    patch, size = config["patch_size"], config["image_size"]
    if edge(fields, "size", size) != size:
        raise CheckpointError(
            f"{FILE}: found size {fields.get('size')!r:.80}, accepted: {size}"
        )
    most = fields.get("max_patches", MOST_TILES)
    if type(most) is not int or not 0 < most <= MAX_TILES:
        raise CheckpointError(
            f"{FILE}: max_patches: found {most!r:.80}, accepted: 1 to {MAX_TILES}"
        )
    return TileSettings(
        patch_size=patch,
        merge_size=config["merge_size"],
        side=size // patch,
        most=most,
        largest=fields.get("resize_to_max_canvas") is True,
        normalization=read_normalization(fields, BILINEAR),
    )
