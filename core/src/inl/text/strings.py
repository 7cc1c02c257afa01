"""Lazy string arrays: located in one vectorized pass, decoded on access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, final, overload

import numpy as np

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    Buffer = mmap.mmap | bytes

LENGTH_BYTES: Final = 8
"""Bytes of the little-endian length before each string."""


@final
class Strings(Sequence[str]):
    """Sequence of validated UTF-8 strings at ``starts .. stops`` of a buffer."""

    def __init__(
        self, data: Buffer, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> None:
        self._data, self._starts, self._stops = data, starts, stops

    @property
    def stop(self) -> int:
        """Offset behind the last string."""
        return int(self._stops[-1])

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Strings: ...
    def __getitem__(self, index: int | slice) -> str | Strings:
        if isinstance(index, slice):
            return Strings(self._data, self._starts[index], self._stops[index])
        return self._data[self._starts[index] : self._stops[index]].decode()

    def __iter__(self) -> Iterator[str]:
        data = self._data
        spans = zip(self._starts.tolist(), self._stops.tolist(), strict=True)
        return (data[start:stop].decode() for start, stop in spans)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | Strings):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self[:8])) if len(self) <= 8 else f"{list(self[:8])!r:.60}..."


def is_strings(value: Any) -> bool:
    """Return whether a value is a list of strings or a :class:`Strings`."""
    if isinstance(value, Strings):
        return True
    return isinstance(value, list) and all(type(item) is str for item in value)


def scan(data: Buffer, at: int, size: int, count: int) -> Strings | None:
    """Locate ``count`` length-prefixed strings from byte ``at`` in one pass.

    A byte followed by seven zeros is taken as a length, and the guess is verified:
    every string must end where the next length begins. Returns ``None`` if the strings
    have to be parsed sequentially: one is invalid, empty, longer than 255 bytes, or
    contains such zeros.
    """
    window = 3 * LENGTH_BYTES * count
    while True:
        stop = min(at + window, size)
        candidates = _length_offsets(np.frombuffer(data, np.uint8, stop - at, at))
        if len(candidates) > count or stop == size:
            break
        window *= 2
    if len(candidates) < count or not count:
        return None
    offsets = candidates[:count]
    block = np.frombuffer(data, np.uint8, stop - at, at)
    ends = offsets + LENGTH_BYTES + block[offsets]
    if offsets[0] or (ends[:-1] != offsets[1:]).any() or ends[-1] > stop - at:
        return None
    # With the lengths zeroed, one decode checks the UTF-8 of all strings.
    text = block[: ends[-1]].copy()
    text[offsets] = 0
    try:
        text.tobytes().decode()
    except UnicodeDecodeError:
        return None
    return Strings(data, at + offsets + LENGTH_BYTES, at + ends)


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
