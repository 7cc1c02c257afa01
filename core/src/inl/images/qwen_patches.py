"""Images as patches of Qwen-VL: resized to whole squares of patches, normalized.

As the image processor of transformers: bicubic, in the order of squares of
``merge_size`` by ``merge_size`` patches, whose features become one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.errors import CheckpointError, RequestError
from inl.images.normalization import Normalization, read_normalization

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ASPECT: Final = 200
"""Largest ratio of the sides of an image."""
CLIP: Final = Normalization(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)
"""Of Radford et al., 2021."""


class Patches(NamedTuple):
    """The patches of an image."""

    values: NDArray[np.float32]
    """[T, channels * frames * size * size]."""
    grid: tuple[int, int]
    """Rows and columns of patches; T is their product."""


@dataclass(frozen=True, slots=True)
class PatchSettings:
    """Fields of ``preprocessor_config.json``."""

    patch_size: int = 14
    frames: int = 2
    """Frames of a patch, which all are the image."""
    merge_size: int = 2
    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    """Pixels of a resized image."""
    normalization: Normalization = CLIP
    enlarges: bool = False
    """Whether sides shorter than a square are made as long first (PaddleOCR-VL)."""

    @property
    def square(self) -> int:
        """Pixels of the side of the squares whose features become one."""
        return self.patch_size * self.merge_size

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return self.most // self.patch_size**2

    def grid_of(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Return the rows and columns of patches of an image."""
        given, square = (height, width), self.square
        if self.enlarges and height < square:
            height, width = square, round(width * square / height)
        if self.enlarges and width < square:
            height, width = round(height * square / width), square
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise RequestError(
                f"{where}: found {given[1]} x {given[0]} pixels, accepts sides whose "
                f"ratio is at most {MAX_ASPECT}"
            )
        size = height, width
        near = [round(side / square) * square for side in size]
        if near[0] * near[1] > self.most:
            scale = math.sqrt(height * width / self.most)
            near = [
                max(square, math.floor(side / scale / square) * square) for side in size
            ]
        elif near[0] * near[1] < self.least:
            scale = math.sqrt(self.least / (height * width))
            near = [math.ceil(side * scale / square) * square for side in size]
        return near[0] // self.patch_size, near[1] // self.patch_size

    def patches(self, pixels: NDArray[np.uint8], where: str) -> Patches:
        """Return the patches of an image [height, width, 3]."""
        rows, columns = self.grid_of(pixels.shape[0], pixels.shape[1], where)
        size, merge, normal = self.patch_size, self.merge_size, self.normalization
        resized = normal.resized(pixels, rows * size, columns * size)
        x = in_squares(normal.apply(resized), (rows, columns), merge)[:, :, None]
        x = np.broadcast_to(x, (*x.shape[:2], self.frames, size, size))
        return Patches(x.reshape(rows * columns, -1), (rows, columns))

    def pieces(self, grid: tuple[int, int]) -> tuple[int | str, ...]:
        """Return the features of an image, one after the other."""
        return (grid[0] * grid[1] // self.merge_size**2,)


def in_squares(
    x: NDArray[np.float32], grid: tuple[int, int], merge: int
) -> NDArray[np.float32]:
    """Return the patches [T, channels, size, size] of pixels [channels, height, width].

    In the order of squares of ``merge`` by ``merge`` patches, as their features. grid:
    rows and columns of patches.
    """
    rows, columns = grid
    channels, size = len(x), x.shape[1] // rows
    x = x.reshape(channels, rows // merge, merge, size, columns // merge, merge, size)
    return x.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels, size, size)


PADDLE: Final = PatchSettings(
    frames=1, least=384 * 384, most=1536 * 1536, enlarges=True
)
"""Defaults of PaddleOCR-VL."""


def read_settings(
    fields: Mapping[str, Any], vision: Mapping[str, Any],
    plain: PatchSettings = PatchSettings(),
) -> PatchSettings:  # fmt: skip
    """Read settings; raises :class:`CheckpointError`.

    fields: of ``preprocessor_config.json``, empty without one. vision: of the vision
    encoder's config, which decides the sizes of patches. plain: defaults.
    """
    size = fields.get("size")
    size = size if isinstance(size, Mapping) else {}
    most = size.get("longest_edge", fields.get("max_pixels") or plain.most)
    least = size.get("shortest_edge", fields.get("min_pixels") or plain.least)
    found = PatchSettings(
        patch_size=vision.get("patch_size", 14),
        frames=vision.get("temporal_patch_size", 2),
        merge_size=vision.get("spatial_merge_size", 2),
        least=fields.get("min_pixels") or least,
        most=fields.get("max_pixels") or most,
        normalization=read_normalization(fields, CLIP),
        enlarges=plain.enlarges,
    )
    counts = found.patch_size, found.frames, found.merge_size, found.least, found.most
    if not all(type(count) is int and count > 0 for count in counts) or (
        found.least > found.most
    ):
        raise CheckpointError(
            f"preprocessor_config.json: found {found}, accepted: positive whole "
            "numbers, and no least number of pixels above the largest"
        )
    return found
