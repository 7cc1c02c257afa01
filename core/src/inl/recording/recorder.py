"""Flight recorder: stores the frames and replies of a runner for ``inl replay``.

References to the newest steps stay in memory; :meth:`Recorder.write` writes them to a
file. A recorder with a path writes everything there as it happens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from inl.errors import RunnerError
from inl.forks import disconnect, on_fork
from inl.protocol.runner import AdapterSource

if TYPE_CHECKING:
    from typing import BinaryIO

    from inl.protocol.runner import BlockWrites, CacheWrite, Reply
    from inl.protocol.token_masks import TokenMasks
    from inl.recording.trace_file import Item, RunHeader
    from inl.spec.message import IntArray

log = logging.getLogger("inl")

STEPS = 1000
"""Steps stored in memory."""

LARGE, MAX_LARGE_BYTES = 1 << 18, 64 << 20
"""Bytes from which on a frame is large, as those with embeddings are; and how many of
such frames are stored in memory. Older items are dropped earlier for them."""


class Recorder:
    """Stores frames and replies; called by the engine's step loop only.

    run_header: returns the header of the run, called when it is written. path: trace
    file to write. Raises :class:`~inl.errors.RunnerError` if it cannot be written; on a
    disk that is full later the trace ends, not the steps, and :meth:`close` raises it.
    """

    def __init__(
        self, run_header: Callable[[], RunHeader], path: str | Path | None = None
    ) -> None:
        self._header = run_header
        # A step is a frame and a reply; admissions and releases are few.
        self._ring: deque[Item | BlockWrites] = deque()
        self._large_bytes = 0
        self._before: dict[int, AdapterSource] = {}
        """Adapters that were loaded before the first item of the ring, by number."""
        self._adapters: dict[int, AdapterSource] = {}
        """Adapters that are loaded now, by number."""
        self._path = None if path is None else Path(path)
        self._file: BinaryIO | None = None
        self._failure: RunnerError | None = None
        """Why the trace has ended early."""
        on_fork(self)
        if self._path is not None:
            from inl.recording.trace_file import MAGIC, pack

            try:
                # With a buffer of 1 MiB most writes are copies in memory.
                self._file = self._path.open("wb", buffering=1 << 20)
                self._file.write(MAGIC + pack(run_header()))
            except OSError as error:
                raise _write_error(self._path, error) from error

    def add(
        self,
        item: IntArray | TokenMasks | Reply | AdapterSource | CacheWrite | BlockWrites,
    ) -> None:
        """Record a submitted frame, the masks of a step, a reply or an adapter.

        Or a WRITE frame with its contents.

        The item must not change afterwards.
        """
        if isinstance(item, AdapterSource):
            self._adapters[item.number] = item
        if len(self._ring) == 2 * STEPS:
            self._drop()
        self._ring.append(item)
        self._large_bytes += _large_bytes(item)
        while self._large_bytes > MAX_LARGE_BYTES and len(self._ring) > 1:
            self._drop()
        if self._file is not None:
            self._write(item)

    def begin(self, header: Callable[[], RunHeader] | None = None) -> None:
        """Start the records of a runner that has none of the earlier state.

        header: of another runner; ``None`` for the same one after a reset.
        """
        self._header = header or self._header
        self._ring.clear()
        self._large_bytes = 0
        # The same runner keeps them; another one loads them before it serves.
        self._ring.extend(self._adapters.values())
        self._before.clear()
        if self._file is not None:
            for item in (self._header(), *self._adapters.values()):
                if self._file is not None:
                    self._write(item)

    def _drop(self) -> None:
        """Drop the oldest item; an adapter is kept, for later steps may need it."""
        item = self._ring.popleft()
        self._large_bytes -= _large_bytes(item)
        if isinstance(item, AdapterSource):
            self._before[item.number] = item

    def after_fork_in_child(self) -> None:
        """Leave the file to the parent; the child keeps its records in memory."""
        if self._file is not None:
            disconnect(self._file.fileno())
            self._file = None

    def _write(self, item: Item | BlockWrites) -> None:
        assert self._file is not None, "checked by callers"
        assert self._path is not None, "a file has a path"
        from inl.recording.trace_file import pack

        try:
            self._file.write(pack(item))
        except OSError as error:
            # Closing fails too: it writes the buffer again.
            with suppress(OSError):
                self._file.close()
            self._file = None
            self._failure = _write_error(self._path, error)
            log.error("%s; the trace ends here", self._failure)

    def write(self, path: str | Path) -> None:
        """Write the steps in memory to a file for ``inl replay``."""
        from inl.recording.trace_file import MAGIC, pack

        items: Iterable[Item | BlockWrites] = (
            self._header(),
            *self._before.values(),
            *self._ring,
        )
        try:
            Path(path).write_bytes(MAGIC + b"".join(map(pack, items)))
        except OSError as error:
            raise _write_error(Path(path), error) from error

    def close(self) -> None:
        """Finish the file; closing twice is allowed."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            assert self._path is not None, "a file has a path"
            raise _write_error(self._path, error) from error


def _large_bytes(item: Item | BlockWrites) -> int:
    """Return the size of a large frame, 0 for any other item."""
    size = getattr(item, "nbytes", 0)
    return size if isinstance(size, int) and size >= LARGE else 0


def _write_error(path: Path, error: OSError) -> RunnerError:
    return RunnerError(
        f"trace {path}: cannot be written: {error.strerror or error}; "
        "give a writable path with free space"
    )
