"""Images as squares of one size, each of which SigLIP encodes for itself.

Of Gemma 3 (one square, and those of pan and scan), Idefics3 (Laurençon et al., 2024)
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


FIRST: Final = "Here is the original image "
CROPS: Final = " and here are some crops to help you see better "
"""Texts before the whole image and before its crops."""


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """Crops of an image that is far wider than high, or higher than wide."""

    least: int = 256
    """Pixels of the shorter side of a crop."""
    most: int = 4
    """Crops of an image."""
    ratio: float = 1.2
    """Of the sides, from which an image is cropped."""

    def crops_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of crops; 1 and 1 for an image without."""
        long, short = max(height, width), min(height, width)
        if long / short < self.ratio:
            return 1, 1
        count = min(long // self.least, math.floor(long / short + 0.5))
        count = min(max(count, 2), self.most)
        if min(math.ceil(long / count), short) < self.least:
            return 1, 1
        return (1, count) if width >= height else (count, 1)


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
    pan_and_scan: PanAndScan | None = None
    """Of an image of a single square."""

    @property
    def max_patches(self) -> int:
        """Patches of the largest image, in tiles and as a whole."""
        if self.pan_and_scan is not None:
            return (self.pan_and_scan.most + 1) * self.side**2
        tiles = math.ceil(self.longest / (self.side * self.patch_size)) ** 2
        return (min(tiles, MAX_TILES) + 1) * self.side**2

    def grid_of(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Return the rows and columns of patches of all tiles of an image."""
        size = self.side * self.patch_size
        if self.pan_and_scan is not None:
            rows, columns = self.pan_and_scan.crops_of(height, width)
            return rows * self.side, columns * self.side
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
        if self.longest and grid != (self.side, self.side):
            tiles = [
                pixels[top : top + size, left : left + size]
                for top in range(0, pixels.shape[0], size)
                for left in range(0, pixels.shape[1], size)
            ]
        elif self.pan_and_scan is not None and grid != (self.side, self.side):
            tiles = self._crops(pixels, grid)
        # Crops follow the whole image, and tiles are before it.
        at = 0 if self.pan_and_scan is not None else len(tiles)
        tiles.insert(at, resized(pixels, size, size))
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
        rows, columns = (side // self.side for side in grid)
        if not self.is_tagged:
            crops = rows * columns
            if crops == 1:
                return (count,)
            return FIRST, count, CROPS, count, *(" ", count) * (crops - 1)
        if (rows, columns) == (1, 1):
            return AROUND + WHOLE, count, AROUND
        parts: list[int | str] = []
        for row in range(rows):
            before = "\n" if row else ""
            for column in range(columns):
                parts += [f"{before}{AROUND}<row_{row + 1}_col_{column + 1}>", count]
                before = ""
        return *parts, f"\n\n{AROUND}{WHOLE}", count, AROUND

    def _crops(
        self, pixels: NDArray[np.uint8], grid: tuple[int, int]
    ) -> list[NDArray[np.uint8]]:
        """Return the crops of an image, row by row, each as a square."""
        size = self.side * self.patch_size
        height, width = (
            math.ceil(length / (count // self.side))
            for length, count in zip(pixels.shape[:2], grid, strict=True)
        )
        return [
            self.normalization.resized(
                pixels[top : top + height, left : left + width], size, size
            )
            for top in range(0, pixels.shape[0], height)
            for left in range(0, pixels.shape[1], width)
        ]

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
    if edge(fields, "size", size) != size:
        raise CheckpointError(
            f"{FILE}: found size {fields.get('size')!r:.80}, accepted: {size}"
        )
    return SquareSettings(
        patch_size=patch,
        merge_size=config["merge_size"],
        side=size // patch,
        normalization=read_normalization(fields, BILINEAR),
        pan_and_scan=_pan_and_scan(fields),
    )


def _pan_and_scan(fields: Mapping[str, Any]) -> PanAndScan | None:
    """Read how crops are made, ``None`` for a processor that makes none."""
    if not fields.get("do_pan_and_scan"):
        return None
    names = {
        "least": "min_crop_size", "most": "max_num_crops",
        "ratio": "min_ratio_to_activate",
    }  # fmt: skip
    given = {
        own: fields[f"pan_and_scan_{name}"]
        for own, name in names.items()
        if fields.get(f"pan_and_scan_{name}") is not None
    }
    found = PanAndScan(**given)
    if (
        not all(type(each) is int and each > 0 for each in (found.least, found.most))
        or not 1 < found.most < MAX_TILES
        or type(found.ratio) not in (int, float)
        or not 1 <= found.ratio < math.inf
    ):
        raise CheckpointError(
            f"{FILE}: found {found}, accepted: pixels, 2 to {MAX_TILES - 1} crops, and "
            "a ratio of 1 or more"
        )
    return found


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
