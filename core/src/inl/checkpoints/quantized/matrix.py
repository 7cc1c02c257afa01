"""Quantized matrices of any format: codes, scales, zeros, and groups that share them.

One description for every packing: ``value = scale * (code - zero) + offset``. Where its
groups permit, a matrix is repacked as blocks of a dtype that kernels compute with; any
other one is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.blocks.encode import BLOCK as BLOCK
from inl.dtypes import HostArray, wrap

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS: Final = 256
"""Rows that are decoded at once."""
RANGES: Final = {"q4_0": (-8, 7), "q4_1": (0, 15), "q8_0": (-128, 127)}
"""Codes of the dtypes that matrices are repacked as."""


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
    offset: NDArray[np.float32] | None = None
    """[R, G]: added to the scaled codes; ``None`` is 0."""

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
            if self.offset is not None:
                out[part] += self.offset[shared][:, groups]
        return wrap(out)

    def blocks(self, dtype: str) -> HostArray | None:
        """Repack as a dtype of ``RANGES``, with scales and offsets in float16.

        ``None`` if codes do not fit, or :func:`halves` refuses a scale or an offset.
        """
        count, size = self.codes.shape
        if self.columns is not None or self.width % BLOCK or size % BLOCK:
            return None
        codes, shifts = self.codes.astype(np.int16), self.offset
        if dtype == "q4_1":
            first = min(int(codes.min()), 0)
            codes -= np.int16(first)
            shifts = self._offsets(first)
        elif shifts is not None and shifts.any():
            return None
        elif self.zero is not None:
            codes -= np.repeat(self._spread(self.zero), BLOCK, 1).astype(np.int16)
        low, high = RANGES[dtype]
        if codes.min() < low or codes.max() > high:
            return None
        heads = [halves(self.scale)]
        if dtype == "q4_1" and shifts is not None:
            heads.append(halves(shifts, np.float32(2**-8) * np.abs(self.scale)))
        parts: list[NDArray[Any]] = []
        for head in heads:
            if head is None:
                return None
            parts.append(self._spread(head)[:, :, None].view(np.uint8))
        blocks = codes.reshape(count, -1, BLOCK)
        if dtype == "q8_0":
            parts.append(blocks.astype(np.int8).view(np.uint8))
        else:
            nibbles = (blocks - low).astype(np.uint8)
            parts.append(nibbles[:, :, :16] | nibbles[:, :, 16:] << 4)
        data = np.concatenate(parts, axis=2).reshape(count, -1)
        return HostArray(data, dtype, (count, size))

    def _offsets(self, first: int) -> NDArray[np.float32]:
        """Return the values of the code ``first``, [R, G]."""
        zero = 0 if self.zero is None else self.zero
        values = (first - zero) * self.scale
        return values if self.offset is None else values + self.offset

    def _spread(self, shared: NDArray[Any]) -> NDArray[Any]:
        """Return what groups share for each block, [N, K / BLOCK]."""
        count, size = self.codes.shape
        rows = shared[np.arange(count) // self.rows]
        spread = np.repeat(rows, self.width // BLOCK, axis=1)
        return np.ascontiguousarray(spread[:, : size // BLOCK])


def halves(
    values: NDArray[np.float32], least: NDArray[np.float32] | None = None
) -> NDArray[np.float16] | None:
    """Round to float16; ``None`` if a value changes by more than 2**-11 of its size.

    That is a quarter of what rounding a decoded matrix to bfloat16 may change. A change
    of ``least``, by default 2**-20 of the largest value, is accepted in any case.
    """
    size = np.abs(values)
    floor = 2.0**-20 * size.max(initial=0) if least is None else least
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
        near = np.abs(rounded - values) <= np.maximum(2.0**-11 * size, floor)
    return rounded if bool(near.all()) else None


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
