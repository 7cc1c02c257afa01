"""Many strings of a file, found at once and decoded one by one, when asked for."""

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
    """UTF-8 strings at ``starts .. stops`` of a buffer, which has been checked."""

    def __init__(
        self, data: Buffer, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> None:
        self._data, self._starts, self._stops = data, starts, stops

    @property
    def stop(self) -> int:
        """Where the last one ends."""
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


def is_strings(found: Any) -> bool:
    """Whether a value is a list of strings, or one that lies in a file."""
    if isinstance(found, Strings):
        return True
    return isinstance(found, list) and all(type(one) is str for one in found)


def scan(data: Buffer, at: int, size: int, count: int) -> Strings | None:
    """Find ``count`` strings from byte ``at`` on, all of them in one sweep.

    Their lengths are where seven zeros follow a byte. That is a guess, until each
    string is seen to end where the next begins: so it is what reading them in turn
    finds, or ``None`` where it must be done in turn, to say what is wrong or because
    a string is empty, longer than 255 bytes, or has such zeros in it.
    """
    window = 3 * LENGTH_BYTES * count
    while True:
        stop = min(at + window, size)
        found = _places(np.frombuffer(data, np.uint8, stop - at, at))
        if len(found) > count or stop == size:
            break
        window *= 2
    if len(found) < count or not count:
        return None
    places = found[:count]
    block = np.frombuffer(data, np.uint8, stop - at, at)
    ends = places + LENGTH_BYTES + block[places]
    if places[0] or (ends[:-1] != places[1:]).any() or ends[-1] > stop - at:
        return None
    # Lengths are no text; with zeros for them, all is UTF-8 or some string is not.
    text = block[: ends[-1]].copy()
    text[places] = 0
    try:
        text.tobytes().decode()
    except UnicodeDecodeError:
        return None
    return Strings(data, at + places + LENGTH_BYTES, at + ends)


def _places(block: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where a byte is followed by seven zeros."""
    zero = block == 0
    last = len(block) - LENGTH_BYTES + 1
    if last <= 0:
        return np.zeros(0, np.int64)
    run = zero[1 : last + 1].copy()
    for shift in range(2, LENGTH_BYTES):
        run &= zero[shift : last + shift]
    return np.flatnonzero(run)
