"""Lazy string arrays: located and checked in pieces, decoded on access."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, final, overload

import numpy as np
from numpy.typing import NDArray

LENGTH: Final = struct.Struct("<Q")
LENGTH_BYTES: Final = 8
"""Bytes of the little-endian length before each string."""
SEPARATOR: Final = "\0" * LENGTH_BYTES
PIECE: Final = 1 << 12
"""Strings whose offsets are converted at a time."""


@final
class Strings(Sequence[str]):
    """Sequence of UTF-8 strings in a buffer, each with its length before it.

    data: [bytes] uint8. starts: offsets of the texts. stop: offset behind the last one.
    """

    def __init__(
        self, data: NDArray[np.uint8], starts: NDArray[np.uint32], stop: int
    ) -> None:
        self._data, self._starts, self.stop = data, starts, stop

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        last = at + 1 == len(self)
        stop = self.stop if last else int(self._starts[at + 1]) - LENGTH_BYTES
        return self._data[int(self._starts[at]) : stop].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), PIECE):
            starts = self._starts[first : first + PIECE + 1].astype(np.int64)
            if first + PIECE >= len(self):
                starts = np.append(starts, self.stop + LENGTH_BYTES)
            yield from _decoded(self._data[starts[0] : starts[-1]], starts - starts[0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | Strings):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:8]) if len(self) <= 8 else f"{self[:8]!r:.60}..."


def _decoded(block: NDArray[np.uint8], starts: NDArray[np.int64]) -> list[str]:
    """Decode strings, each followed by the length of the next one.

    block: may end before the last length. starts: offsets of the strings, and the end.
    """
    end = int(starts[-1]) - LENGTH_BYTES
    text = block[:end].copy()
    lengths = starts[1:-1, None] - np.arange(1, LENGTH_BYTES + 1)
    text[lengths] = 0
    if np.count_nonzero(text) == end - lengths.size:  # no string has a NUL
        return text.tobytes().decode().split(SEPARATOR)
    data = text.tobytes()
    spans = pairwise(starts.tolist())
    return [data[start : stop - LENGTH_BYTES].decode() for start, stop in spans]


def is_strings(value: Any) -> bool:
    """Return whether a value is a list of strings or a :class:`Strings`."""
    if isinstance(value, Strings):
        return True
    return isinstance(value, list) and all(type(item) is str for item in value)


def scan(block: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Locate up to ``count`` length-prefixed strings from the start of a block.

    Vectorized: a byte followed by seven zeros is taken as a length, and the guess is
    verified. Returns the offsets of the lengths of the strings that it has verified,
    and behind them the offset of the next one; [1] if the first string has to be parsed
    otherwise: it is invalid, empty, longer than 255 bytes, contains such zeros, or does
    not end in the block.
    """
    offsets = _length_offsets(block)[: count + 1]
    if not len(offsets) or offsets[0]:
        return np.zeros(1, np.int64)
    ends = offsets + LENGTH_BYTES + block[offsets]
    linked = ends[:-1] == offsets[1:]
    valid = len(linked) if linked.all() else int(linked.argmin())
    if valid == len(linked) and valid < count and ends[-1] <= len(block):
        valid += 1  # the last string, which no other follows in the block
    bounds = np.append(offsets[:valid], ends[valid - 1] if valid else 0)
    return bounds if is_utf8(block, bounds, 1) else np.zeros(1, np.int64)


def walk(block: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Locate strings of any content, one by one; otherwise as :func:`scan`."""
    data, bounds, unpack = block.tobytes(), [0], LENGTH.unpack_from
    at, size = 0, len(data)
    for _ in range(count):
        if at + LENGTH_BYTES > size:
            break
        at += LENGTH_BYTES + unpack(data, at)[0]
        if at > size:
            break
        bounds.append(at)
    return np.array(bounds)


def is_utf8(
    block: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    length_bytes: int = LENGTH_BYTES,
) -> bool:
    """Whether all strings are UTF-8: one decode, with the lengths zeroed.

    length_bytes: number of bytes of the lengths that are not zero already.
    """
    text = block[: bounds[-1]].copy()
    for byte in range(length_bytes):
        text[bounds[:-1] + byte] = 0
    try:
        text.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _length_offsets(block: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the offsets of bytes that seven zeros follow."""
    zero = block == 0
    last = len(block) - LENGTH_BYTES + 1
    if last <= 0:
        return np.zeros(0, np.int64)
    run = zero[1 : last + 1].copy()
    for shift in range(2, LENGTH_BYTES):
        run &= zero[shift : last + shift]
    return np.flatnonzero(run)
