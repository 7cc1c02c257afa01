"""Pixels as numbers of vision encoders: rescaled and normalized by channel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FILE: Final = "preprocessor_config.json"
RESAMPLINGS: Final = (0, 1, 2, 3)
"""Numbers of Pillow's filters: nearest, Lanczos, bilinear and bicubic."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """Fields of ``preprocessor_config.json`` that every processor has."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float = 1 / 255
    resample: int = 3
    """A number of :data:`RESAMPLINGS`."""

    def resized(
        self, pixels: NDArray[np.uint8], height: int, width: int
    ) -> NDArray[np.uint8]:
        """Return pixels [height, width, 3] of an image of another size."""
        from PIL import Image

        if pixels.shape[:2] == (height, width):
            return pixels
        image = Image.fromarray(pixels).resize(
            (width, height), resample=Image.Resampling(self.resample)
        )
        return np.asarray(image)

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return [3, height, width] of pixels [height, width, 3]."""
        scaled = (np.arange(256.0) * self.rescale).astype(np.float32)[:, None]
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        table = (scaled - mean) / std  # of the 256 values of each channel
        normal = np.empty((3, *pixels.shape[:2]), np.float32)
        for channel, values in enumerate(table.T):
            np.take(values, pixels[..., channel], out=normal[channel])
        return normal


def read_normalization(
    fields: Mapping[str, Any], default: Normalization
) -> Normalization:
    """Read the fields of a processor; raises :class:`CheckpointError`."""
    found = Normalization(
        mean=_numbers(fields, "image_mean", default.mean),
        std=_numbers(fields, "image_std", default.std),
        rescale=fields.get("rescale_factor", default.rescale),
        resample=fields.get("resample", default.resample),
    )
    if (
        type(found.rescale) is not float
        or not math.isfinite(found.rescale)
        or found.resample not in RESAMPLINGS
        or not all(found.std)
    ):
        raise CheckpointError(
            f"{FILE}: found {found}, accepted: a number as rescale_factor, one of "
            f"{RESAMPLINGS} as resample, and no zero in image_std"
        )
    return found


def edge(fields: Mapping[str, Any], name: str, default: int) -> int:
    """Read a number of pixels, or the "longest_edge" or "height" of an object.

    Raises :class:`CheckpointError`.
    """
    value = fields.get(name, default)
    if isinstance(value, Mapping):
        value = value.get("longest_edge", value.get("height", default))
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{FILE}: {name}: found {value!r:.80}, expected pixels")
    return value


def _numbers(
    fields: Mapping[str, Any], name: str, default: tuple[float, ...]
) -> tuple[float, ...]:
    values = fields.get(name, default)
    if (
        not isinstance(values, Sequence)
        or len(values) != len(default)
        or not all(type(value) is float and math.isfinite(value) for value in values)
    ):
        raise CheckpointError(
            f"{FILE}: {name}: found {values!r:.80}, expected {len(default)} numbers"
        )
    return tuple(values)
