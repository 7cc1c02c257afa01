"""Images as patches of Pixtral (Agrawal et al., 2024): of any size, in whole squares.

As the image processor of transformers. The tokens of an image are rows of features,
with a token after each row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.images.normalization import Normalization, edge, read_normalization
from inl.images.qwen_patches import CLIP, Patches, in_squares

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST: Final = 1024
"""Default pixels of the longest side."""
BREAK, END = "[IMG_BREAK]", "[IMG_END]"
"""Tokens after a row of features, and after the last one."""


@dataclass(frozen=True, slots=True)
class PixtralSettings:
    """Fields of ``preprocessor_config.json``, and sizes of the encoder."""

    patch_size: int
    merge_size: int
    most: int = MOST
    """Pixels of the longest side of a resized image."""
    normalization: Normalization = CLIP

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        rows, columns = self.grid_of(self.most, self.most, "")
        return rows * columns

    def grid_of(self, height: int, width: int, _where: str) -> tuple[int, int]:
        """Return the rows and columns of patches of an image."""
        ratio = max(height, width) / self.most
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        square = self.patch_size * self.merge_size
        # At least one square: a side far shorter than the other one is rounded to 0.
        rows, columns = (max((side - 1) // square + 1, 1) for side in (height, width))
        return rows * self.merge_size, columns * self.merge_size

    def patches(self, pixels: NDArray[np.uint8], where: str) -> Patches:
        """Return the patches of an image [height, width, 3], in squares."""
        grid = self.grid_of(pixels.shape[0], pixels.shape[1], where)
        height, width = (side * self.patch_size for side in grid)
        resized = self.normalization.resized(pixels, height, width)
        x = in_squares(self.normalization.apply(resized), grid, self.merge_size)
        return Patches(x.reshape(grid[0] * grid[1], -1), grid)

    def pieces(self, grid: tuple[int, int]) -> tuple[int | str, ...]:
        """Return the features of each row, and the texts between them."""
        rows, columns = (side // self.merge_size for side in grid)
        return (columns, BREAK) * (rows - 1) + (columns, END)


def read_settings(
    fields: Mapping[str, Any], config: Mapping[str, Any]
) -> PixtralSettings:
    """Read settings; raises :class:`~inl.errors.CheckpointError`.

    fields: of ``preprocessor_config.json``, empty without one. config: of the encoder.
    """
    return PixtralSettings(
        patch_size=config["patch_size"],
        merge_size=config["spatial_merge_size"],
        most=edge(fields, "size", MOST),
        normalization=read_normalization(fields, CLIP),
    )
