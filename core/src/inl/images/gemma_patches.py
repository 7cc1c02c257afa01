"""Images as patches of Gemma 4: as many as fit, in the proportions of the image.

As the image processor of transformers: bicubic, in whole squares of patches, each of
which becomes one feature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inl.errors import CheckpointError, RequestError
from inl.images.normalization import FILE, Normalization, read_normalization
from inl.images.qwen_patches import Patches, in_squares

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEATURES: Final = (70, 140, 280, 560, 1120)
"""Accepted largest numbers of features of an image."""
BEGIN, END = "<|image>", "<image|>"
"""Tokens around the features of an image."""
PLAIN: Final = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True, slots=True)
class GemmaSettings:
    """Fields of ``preprocessor_config.json``, and sizes of the encoder."""

    patch_size: int
    merge_size: int
    features: int = 280
    """Most features of an image."""
    normalization: Normalization = PLAIN
    """As the encoder takes pixels: from -1 to 1."""

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return self.features * self.merge_size**2

    def grid_of(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Return the rows and columns of patches of an image."""
        square = self.patch_size * self.merge_size
        scale = math.sqrt(self.max_patches * self.patch_size**2 / (height * width))
        rows = math.floor(scale * height / square)
        columns = math.floor(scale * width / square)
        # A side far shorter than the other one has one square; both cannot be 0.
        if not rows:
            rows, columns = 1, min(width // height, self.features)
        elif not columns:
            rows, columns = min(height // width, self.features), 1
        if not 0 < rows * columns <= self.features:
            raise RequestError(
                f"{where}: found {width} x {height} pixels, which are {rows} x "
                f"{columns} features; accepts {self.features}"
            )
        return rows * self.merge_size, columns * self.merge_size

    def patches(self, pixels: NDArray[np.uint8], where: str) -> Patches:
        """Return the patches of an image [height, width, 3], in squares."""
        grid = self.grid_of(pixels.shape[0], pixels.shape[1], where)
        height, width = (side * self.patch_size for side in grid)
        resized = self.normalization.resized(pixels, height, width)
        x = in_squares(self.normalization.apply(resized), grid, self.merge_size)
        return Patches(x.reshape(grid[0] * grid[1], -1), grid)

    def pieces(self, grid: tuple[int, int]) -> tuple[int | str, ...]:
        """Return the features of an image, between the tokens around it."""
        return BEGIN, grid[0] * grid[1] // self.merge_size**2, END


def read_settings(
    fields: Mapping[str, Any], config: Mapping[str, Any]
) -> GemmaSettings:
    """Read settings; raises :class:`~inl.errors.CheckpointError`.

    fields: of ``preprocessor_config.json``, empty without one. config: of the encoder,
    which decides the sizes of patches.
    """
    features = fields.get("max_soft_tokens", 280)
    if features not in FEATURES:
        raise CheckpointError(
            f"{FILE}: max_soft_tokens: found {features!r:.80}, accepted: "
            f"{', '.join(map(str, FEATURES))}"
        )
    if not fields.get("do_normalize"):
        fields = {
            name: value
            for name, value in fields.items()
            if name not in ("image_mean", "image_std")
        }
    plain = read_normalization(fields, PLAIN)
    # The published encoder computes 2 x - 1 of its pixels.
    centered = Normalization(
        tuple(
            mean + 0.5 * std for mean, std in zip(plain.mean, plain.std, strict=True)
        ),
        tuple(0.5 * std for std in plain.std),
        plain.rescale,
        plain.resample,
    )
    return GemmaSettings(
        config["patch_size"], config["pooling_kernel_size"], features, centered
    )
