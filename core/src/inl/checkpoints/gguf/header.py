"""The beginning of a GGUF file in memory, read as far as it is parsed."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from inl.checkpoints.files.tensor_file import TensorFile
from inl.errors import CheckpointError
from inl.text.strings import LENGTH_BYTES, Strings, is_utf8, scan, walk

MAX_HEADER: Final = 256 << 20
"""Size limit in bytes; real headers are below 32 MiB."""
MAX_STRINGS: Final = 1 << 22
"""Limit of the strings in all arrays; the largest vocabularies have 2**20 with merges.
"""
CHUNK: Final = 1 << 20
"""Bytes that are read, and searched for strings, at a time."""

FEW_STRINGS: Final = 16
"""Strings that are parsed one by one where a search ends. Twice as many each time that
a search did not find a quarter of a chunk, so that few bytes are searched twice."""


class Header:
    """A buffer for the first bytes of a file; memory is taken as it is read.

    Raises :class:`CheckpointError` for offsets behind its end.
    """

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self.size = min(file.size, MAX_HEADER)
        # Pages of an array that was not written take no memory.
        self._data = np.empty(self.size, np.uint8)
        self._view = self._data.data
        self._loaded = 0
        self._strings = 0

    def load(self, stop: int) -> None:
        """Read the file up to ``stop`` at least."""
        if stop > self.size:
            self._fail("header", f"{stop} bytes or more", f"at most {self.size}")
        if stop > self._loaded:
            stop = min(max(stop, self._loaded + CHUNK), self.size)
            self._file.read_into(self._view[self._loaded : stop], self._loaded)
            self._loaded = stop

    def bytes(self, start: int, stop: int) -> bytes:
        """Return a copy of the bytes ``[start, stop)``."""
        self.load(stop)
        return bytes(self._view[start:stop])

    def array(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a view of the bytes ``[start, stop)``."""
        self.load(stop)
        return self._data[start:stop]

    def string(self, at: int, what: str) -> tuple[str, int]:
        """Return the string whose length is at ``at``, and the offset behind it."""
        start, stop = self._span(at, what)
        return self._text(start, stop, what), stop

    def strings(self, at: int, count: int, what: str) -> Strings:
        """Return the array of ``count`` strings from ``at`` on."""
        self._strings += count
        if self._strings > MAX_STRINGS:
            self._fail(what, f"{self._strings} strings", f"at most {MAX_STRINGS}")
        starts = np.empty(count, np.uint32)
        done, steps = 0, FEW_STRINGS
        while done < count:
            block = self.array(at, min(at + CHUNK, self.size))
            bounds = scan(block, count - done)
            steps = FEW_STRINGS if bounds[-1] > CHUNK // 4 else 2 * steps
            if len(bounds) == 1:
                bounds = walk(block, min(steps, count - done))
                self._check(bounds + at, block, done, what)
            if len(bounds) == 1:  # longer than the chunk
                start, stop = self._span(at, f"{what}: length of string {done}")
                self._text(start, stop, f"{what}: string {done} at byte {at}")
                bounds = np.array([0, stop - at])
            starts[done : done + len(bounds) - 1] = at + bounds[:-1] + LENGTH_BYTES
            done, at = done + len(bounds) - 1, at + int(bounds[-1])
        return Strings(self._data, starts, at)

    def _check(
        self, bounds: NDArray[np.int64], block: NDArray[np.uint8], done: int, what: str
    ) -> None:
        """Raise for the first string that is not UTF-8; ``done`` is the first's."""
        if not is_utf8(block, bounds - bounds[0]):
            for number, (start, stop) in enumerate(pairwise(bounds.tolist()), done):
                where = f"{what}: string {number} at byte {start}"
                self._text(start + LENGTH_BYTES, stop, where)

    def _span(self, at: int, what: str) -> tuple[int, int]:
        start = at + LENGTH_BYTES
        known = start <= self.size
        length = int.from_bytes(self.bytes(at, start), "little") if known else self.size
        if start + length > self.size:
            rest = max(self.size - start, 0)
            self._fail(
                what, f"{length} at byte {at}", f"at most {rest}, the rest of the file"
            )
        return start, start + length

    def _text(self, start: int, stop: int, what: str) -> str:
        try:
            return self.bytes(start, stop).decode()
        except UnicodeDecodeError as error:
            self._fail(what, error, "UTF-8")

    def _fail(self, what: str, found: object, accepted: str) -> NoReturn:
        raise CheckpointError(
            f"{self._file.path}: {what}: found {found}; accepted: {accepted}"
        )
