"""Dtype names and sizes, and host arrays with dtypes that NumPy lacks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Names of the dtypes that tensors may be stored in, widest first."""

SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every plain dtype."""

FLOAT8 = ("float8_e4m3", "float8_e5m2")
"""8-bit float dtypes, stored as bytes, which :mod:`inl.checkpoints.blocks.dtypes`
decodes."""

E8M0 = "float8_e8m0"
"""8 bits of an exponent: powers of two, in which newer checkpoints store scales."""

E4M3 = FLOAT8[0]
E4M3_LARGEST = 448.0
"""Largest number of float8_e4m3, which has no infinity."""

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
"""Machine epsilon of each float dtype: the gap between 1 and the next number."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array in host memory, with a dtype that NumPy may not have.

    ``data`` stores ``shape`` elements of ``dtype``; bfloat16 is stored as uint16 bits.
    A block-quantized dtype (``"q4_1"``) is stored as uint8 ``[rows..., row bytes]``,
    while ``shape`` is the logical one. ``data`` may be read-only.
    """

    data: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]
    origin: Hashable = None
    """Equal for arrays of the same stored bytes; ``None`` for any other array."""

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    def rows(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Return entries of the first axis of ``data``."""
        chosen: NDArray[Any] = self.data[indices]
        return chosen

    def part(self, index: tuple[slice, ...]) -> NDArray[Any]:
        """Return the elements of a part, a slice of each axis; of a plain dtype."""
        chosen: NDArray[Any] = self.data.reshape(self.shape)[index]
        return chosen

    def pieces(self, rows: int) -> Iterator[HostArray]:  # noqa: ARG002 - for overrides
        """Yield the array in pieces of up to ``rows`` entries of the first axis.

        A piece is valid until the next one. Here a single one, of any size.
        """
        yield self


def wrap(array: NDArray[Any]) -> HostArray:
    """Return a NumPy array as a :class:`HostArray` of its dtype."""
    return HostArray(array, _name(array.dtype), array.shape)


@cache
def _name(dtype: Any) -> str:
    # NumPy computes the name each time, in Python.
    return str(dtype.name)


def widen(array: HostArray) -> NDArray[Any]:
    """Return an array that NumPy computes with: bfloat16 becomes float32.

    Raises ``TypeError`` for a quantized dtype, which
    :mod:`inl.checkpoints.blocks.dtypes` decodes.
    """
    import numpy as np

    if array.dtype == "bfloat16":
        bits = array.data.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(array.shape)
    if array.dtype not in SIZES:
        raise TypeError(f"dtype {array.dtype!r} is packed; decode it first")
    return array.data.reshape(array.shape)


def cast(values: NDArray[Any], dtype: str) -> HostArray:
    """Convert to ``dtype``, rounding to nearest, ties to even."""
    import numpy as np

    if dtype != "bfloat16":
        return wrap(np.asarray(values).astype(dtype, copy=False))
    values = np.asarray(values)
    result = np.empty(values.size, np.uint16)
    flat = values.reshape(-1)
    for start in range(0, values.size, CAST_ELEMENTS):
        stop = start + CAST_ELEMENTS
        result[start:stop] = _bfloat16_bits(flat[start:stop])
    return HostArray(result.reshape(values.shape), dtype, tuple(np.shape(values)))


CAST_ELEMENTS = 1 << 16
"""Numbers that are rounded at a time, in a processor's cache."""


def _bfloat16_bits(values: NDArray[Any]) -> NDArray[Any]:
    """Return the bits of values [n] rounded to bfloat16."""
    import numpy as np

    narrow = np.ascontiguousarray(values, np.float32)
    bits = narrow.view(np.uint32)
    if values.dtype.name == "float64":
        # The first rounding, to float32, decides ties of the second, to bfloat16.
        tie = (bits & 0xFFFF) == 0x8000
        bits = bits + (tie & (np.abs(values) > np.abs(narrow)))
        bits = bits - (tie & (np.abs(values) < np.abs(narrow)))
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result = rounded.astype(np.uint16)
    if (nan := np.isnan(narrow)).any():
        result[nan] = 0x7FC0
    return result


def rounded_e4m3(values: NDArray[Any]) -> NDArray[Any]:
    """Round to float8_e4m3, ties to even, in an array of the dtype of ``values``.

    Magnitudes above 448, the largest number, become 448; NaN stays NaN.
    """
    import numpy as np

    limited = np.clip(values, -E4M3_LARGEST, E4M3_LARGEST)
    # From 2**n to 2**(n+1) numbers are 2**(n-3) apart, below 2**-6 as above it.
    exponent = np.maximum(np.frexp(limited)[1], -5) - 4
    step = np.ldexp(values.dtype.type(1), exponent)
    return np.asarray(np.rint(limited / step) * step)


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round values to ``dtype``, in an array of their own dtype."""
    if values.dtype.name == dtype:
        return values
    import numpy as np

    return np.asarray(widen(cast(values, dtype)).astype(values.dtype))


def decoded_e4m3(bits: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers of float8_e4m3 whose bits are given, in float32."""
    import numpy as np

    codes = np.asarray(bits).view(np.uint8)
    exponent, fraction = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    normal = np.ldexp(fraction / 8 + 1, exponent.astype(np.int32) - 7)
    numbers = np.where(exponent > 0, normal, fraction * np.float32(2.0**-9))
    numbers = np.where(codes & 127 == 127, np.float32(np.nan), numbers)
    return np.where(codes & 128, -numbers, numbers).astype(np.float32)


def encoded_e4m3(values: NDArray[Any]) -> NDArray[Any]:
    """Return the bits of numbers of float8_e4m3, as :func:`rounded_e4m3` makes them."""
    import numpy as np

    positive = decoded_e4m3(np.arange(127, dtype=np.uint8))
    codes = np.searchsorted(positive, np.abs(values)).astype(np.uint8)
    codes = np.where(np.isnan(values), np.uint8(127), codes)
    return np.asarray(codes | (np.signbit(values).astype(np.uint8) << 7))
