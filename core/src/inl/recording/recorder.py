"""The flight recorder: all that a runner was told and what it answered.

The newest steps stay in memory, as references; :meth:`Recorder.write` puts them into a
file, and a recorder with a path writes everything there as it happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from inl.errors import RunnerError
from inl.recording.trace_file import MAGIC, Item, RunHeader, pack

if TYPE_CHECKING:
    from inl.protocol.runner import Reply
    from inl.protocol.token_masks import TokenMasks
    from inl.spec.message import IntArray

STEPS = 1000
"""Steps that are kept in memory."""


class Recorder:
    """Remembers frames and replies; the engine's loop is its only caller.

    begin: says what runs, once it is to be written; told anew where a fresh runner
    takes over. Raises :class:`~inl.errors.RunnerError` for a path that cannot be
    written.
    """

    def __init__(
        self, begin: Callable[[], RunHeader], path: str | Path | None = None
    ) -> None:
        self._header = begin
        # A step is a frame and a reply; admissions and releases are few.
        self._ring: deque[Item] = deque(maxlen=2 * STEPS)
        self._path = None if path is None else Path(path)
        self._file = None
        if self._path is not None:
            try:
                # 1 MiB of buffer: a write is a copy in memory, and a disk seldom.
                self._file = self._path.open("wb", buffering=1 << 20)
                self._file.write(MAGIC + pack(begin()))
            except OSError as error:
                raise _unwritable(self._path, error) from error

    def add(self, item: IntArray | TokenMasks | Reply) -> None:
        """Record a submitted frame, the masks of a step, or a collected reply.

        What is added must not be changed any more.
        """
        self._ring.append(item)
        if self._file is not None:
            self._write(item)

    def begin(self, header: Callable[[], RunHeader]) -> None:
        """Take note that a fresh runner, which remembers nothing, takes over."""
        self._header = header
        self._ring.clear()
        if self._file is not None:
            self._write(header())

    def _write(self, item: Item) -> None:
        assert self._file is not None, "asked for by callers"
        assert self._path is not None, "a file has a path"
        try:
            self._file.write(pack(item))
        except OSError as error:
            # Closing tries to write what is buffered, once more in vain.
            with suppress(OSError):
                self._file.close()
            self._file = None
            raise _unwritable(self._path, error) from error

    def write(self, path: str | Path) -> None:
        """Write the newest steps to a file for ``inl replay``."""
        items: Iterable[Item] = (self._header(), *self._ring)
        try:
            Path(path).write_bytes(MAGIC + b"".join(map(pack, items)))
        except OSError as error:
            raise _unwritable(Path(path), error) from error

    def close(self) -> None:
        """Finish the file; closing twice is allowed."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            assert self._path is not None, "a file has a path"
            raise _unwritable(self._path, error) from error


def _unwritable(path: Path, error: OSError) -> RunnerError:
    return RunnerError(
        f"trace {path}: cannot be written: {error.strerror or error}; "
        "give a path in a folder with room"
    )
