"""Bilinear resizing in fixed point with 16-bit weights, as torch resizes 8-bit images.

Pillow's weights have more bits, so that its results differ by 1 in some pixels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHT_BITS: Final = 15
MAX_PRECISION: Final = 22


def resized(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Return pixels [height, width, C] of an image of another size, antialiased."""
    if pixels.shape[1] != width:
        turned = _along_rows(np.ascontiguousarray(pixels.swapaxes(0, 1)), width)
        pixels = np.ascontiguousarray(turned.swapaxes(0, 1))
    if pixels.shape[0] != height:
        pixels = _along_rows(pixels, height)
    return pixels


def _along_rows(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return ``size`` rows, each a weighted sum of stored ones."""
    first, weights, precision = _taps(len(pixels), size)
    total = np.full((size, *pixels.shape[1:]), 1 << (precision - 1), np.int32)
    for tap in range(weights.shape[1]):
        at = np.minimum(first + tap, len(pixels) - 1)
        total += weights[:, tap].reshape(-1, 1, 1) * pixels[at].astype(np.int32)
    rounded: NDArray[np.uint8] = np.clip(total >> precision, 0, 255).astype(np.uint8)
    return rounded


def _taps(stored: int, size: int) -> tuple[Any, NDArray[np.int32], int]:
    """Return the first row [size] of each sum, its weights [size, taps], their bits."""
    scale = stored / size
    support, shrink = max(scale, 1.0), 1 / max(scale, 1.0)
    centers = scale * (np.arange(size) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    counts = np.minimum((centers + support + 0.5).astype(np.int64), stored) - first
    taps = np.arange(math.ceil(support) * 2 + 1)
    distance = np.abs((taps + first[:, None] - centers[:, None] + 0.5) * shrink)
    weights = np.where(taps < counts[:, None], np.maximum(1 - distance, 0), 0)
    weights /= weights.sum(1, keepdims=True)
    most, precision = weights.max(), 0
    while precision < MAX_PRECISION and (
        int(0.5 + most * (1 << (precision + 1))) < 1 << WEIGHT_BITS
    ):
        precision += 1
    return first, (weights * (1 << precision) + 0.5).astype(np.int32), precision
