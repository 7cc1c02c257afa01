"""Quantized matrices of any format: codes, scales, zeros, and groups that share them.

One description for every packing: ``value = scale * (code - zero)``. Where its groups
permit, a matrix is repacked without loss as blocks of a dtype that kernels compute
with; any other one is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.dtypes import HostArray, wrap

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK: Final = 32
"""Columns that share a scale in a block of q4_0 and q8_0."""
ROWS: Final = 256
"""Rows that are decoded at once."""


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """A matrix [N, K] of codes with scales [R, G], or [N, G], that groups share."""

    codes: NDArray[Any]
    """[N, K]: integers, or floats that scales multiply."""
    scale: NDArray[np.float32]
    """[R, G], finite."""
    zero: NDArray[np.int32] | None = None
    """[R, G]: code of zero; ``None`` is 0."""
    rows: int = 1
    """Consecutive rows that share a row of ``scale``."""
    columns: NDArray[np.int64] | None = None
    """[K]: group of each column; ``None`` if groups are runs of ``width`` columns."""
    width: int = 1
    """Columns of a group."""

    def values(self) -> HostArray:
        """Decode to float32 [N, K]."""
        count, size = self.codes.shape
        out = np.empty((count, size), np.float32)
        groups = self.columns
        if groups is None:
            groups = np.arange(size) // self.width
        for start in range(0, count, ROWS):
            part = slice(start, min(start + ROWS, count))
            shared = np.arange(part.start, part.stop) // self.rows
            out[part] = self.codes[part]
            if self.zero is not None:
                out[part] -= self.zero[shared][:, groups]
            out[part] *= self.scale[shared][:, groups]
        return wrap(out)

    def blocks(self, dtype: str) -> HostArray | None:
        """Repack as "q4_0" or "q8_0"; ``None`` if that would change a value."""
        count, size = self.codes.shape
        if self.columns is not None or self.width % BLOCK or size % BLOCK:
            return None
        per_group = self.width // BLOCK
        shared = np.arange(count) // self.rows
        half = self.scale.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), self.scale):
            return None
        values = self.codes.astype(np.int16).reshape(count, -1, BLOCK)
        number = values.shape[1]
        if self.zero is not None:
            zeros = np.repeat(self.zero[shared], per_group, axis=1)[:, :number]
            values = values - zeros[:, :, None].astype(np.int16)
        low, high = (-8, 7) if dtype == "q4_0" else (-128, 127)
        if values.min() < low or values.max() > high:
            return None
        scales = np.repeat(half[shared], per_group, axis=1)[:, :number]
        parts: list[NDArray[Any]] = [
            np.ascontiguousarray(scales)[:, :, None].view(np.uint8)
        ]
        if dtype == "q4_0":
            nibbles = (values + 8).astype(np.uint8)
            parts.append(nibbles[:, :, :16] | nibbles[:, :, 16:] << 4)
        else:
            parts.append(values.astype(np.int8).view(np.uint8))
        data = np.concatenate(parts, axis=2).reshape(count, -1)
        return HostArray(data, dtype, (count, size))


def unpack_words(
    words: NDArray[Any], bits: int, *, axis: int = -1
) -> NDArray[np.uint8]:
    """Unpack codes of 2, 3, 4 or 8 bits, the lowest first, from int32 along an axis.

    Codes of 3 bits continue in the next word: three words store 32 of them.
    """
    moved = np.moveaxis(np.ascontiguousarray(words).view(np.uint32), axis, -1)
    if bits == 3:
        triples = moved.reshape(*moved.shape[:-1], -1, 3).astype(np.uint64)
        low = triples[..., 0] | triples[..., 1] << np.uint64(32)
        high = triples[..., 1] >> np.uint64(16) | triples[..., 2] << np.uint64(16)
        # 16 codes from the first 48 bits, and 16 from the last.
        moved, shifts = np.stack([low, high], -1), np.arange(0, 48, 3, dtype=np.uint64)
    else:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = moved[..., None] >> shifts & moved.dtype.type(2**bits - 1)
    flat = codes.astype(np.uint8).reshape(*words_shape(moved, bits), -1)
    return np.moveaxis(flat, -1, axis)


def words_shape(moved: NDArray[Any], bits: int) -> tuple[int, ...]:
    """Return the axes of unpacked words other than the last."""
    return moved.shape[: -2 if bits == 3 else -1]
