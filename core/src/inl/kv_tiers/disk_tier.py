"""Blocks in files of one folder, which survive the process.

Files are written by a thread, atomically, and read several at a time. Whatever fails is
a block that is not stored: it is computed again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from inl.cache_dir.private_folder import IS_SUPPORTED, PrivateFolder, Untrusted
from inl.errors import RequestError
from inl.forks import on_fork
from inl.kv.tier import Place
from inl.kv_tiers.host_tier import nbytes
from inl.kv_tiers.record import BadRecord, Identity, decoded, encoded, head
from inl.spec.cache_layout import copied

if TYPE_CHECKING:
    from inl.spec.cache_layout import Empty, Parts

log = logging.getLogger("inl")

SUFFIX = ".kv"
GENERATION = "generation"
MAX_QUEUED_BYTES = 256 << 20
"""Contents that wait to be written; more are not stored."""

READERS = min(os.cpu_count() or 1, 16)
"""Files that are read at a time."""

Task = tuple[Place, "Parts"] | threading.Event | None
"""What the thread does: write contents, set an event, or end."""


class DiskTier:
    """Contents of blocks in files, ``capacity`` bytes at most.

    empty: allocates what files are read to, on several threads.
    Raises :class:`~inl.errors.RequestError` for a folder that cannot be used.
    """

    def __init__(
        self,
        path: Path,
        capacity: int,
        identity: Identity,
        *,
        empty: Empty | None = None,
    ) -> None:
        if not IS_SUPPORTED:
            raise RequestError(f"kv_disk {path}: this system has no private folders")
        try:
            self._folder = PrivateFolder(path, create=True)
            self._secret = self._folder.key()
            self._generation = self._read_generation()
        except (OSError, Untrusted) as error:
            raise RequestError(f"kv_disk {path}: {error}") from error
        self.path, self.capacity, self._identity = path, capacity, identity
        self._empty = empty
        self._most = 2 * max(each.block_bytes for each in identity.layouts) + (1 << 16)
        self.counts: Counter[str] = Counter()
        """Records "written", and those "missing", "damaged", "foreign" and "stale"."""
        self.on_drop: Callable[[Place], None] | None = None
        """Called with each block that is removed, on any thread; returns at once."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes of each file, the least recently used first."""
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        """Notified when the queue has room."""
        self._queue: SimpleQueue[Task] = SimpleQueue()
        self._queued: dict[Place, Parts] = {}
        self._queued_bytes = 0
        self._writes, self._is_closed = True, False
        self._readers: ThreadPoolExecutor | None = None
        self._list()
        self._writer = threading.Thread(target=self._write_queued, daemon=True)
        self._writer.start()
        on_fork(self)

    def __contains__(self, place: Place) -> bool:
        return place in self._queued or name_of(place) in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, place: Place, parts: Parts, *, waits: bool = False) -> None:
        """Queue contents to be written, if there is room; waits: until there is."""
        size = nbytes(parts)
        with self._has_room:
            while waits and self._writes and self._is_full(size):
                self._has_room.wait()
            if self._is_full(size) or not self._writes or place in self:
                return
            self._queued[place] = parts
            self._queued_bytes += size
        self._queue.put((place, parts))

    def _is_full(self, size: int) -> bool:
        return self._queued_bytes > 0 and self._queued_bytes + size > MAX_QUEUED_BYTES

    def get(self, place: Place) -> Parts | None:
        """Read and check contents; ``None``, and a count, if they cannot be used."""
        with self._lock:
            if (queued := self._queued.get(place)) is not None:
                return queued
        name = name_of(place)
        own = head(self._identity, *place, self._generation)
        try:
            data = self._folder.read(name, self._most)
            parts = decoded(self._secret, own, data)
        except FileNotFoundError as error:
            self._drop(name, "missing", error)  # another process has removed it
            return None
        except (OSError, Untrusted) as error:
            self._drop(name, "damaged", error)
            return None
        except BadRecord as error:
            self._drop(name, error.kind, error)
            return None
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return parts if self._empty is None else copied(parts, self._empty)

    def get_all(self, places: Sequence[Place]) -> Iterator[Parts | None]:
        """Read several contents at a time: hashing takes longer than most disks do."""
        if len(places) == 1:
            return map(self.get, places)
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="inl-kv")
        return self._readers.map(self.get, places)

    def flush(self) -> None:
        """Wait until all that was queued is written."""
        done = threading.Event()
        self._queue.put(done)
        if self._writer.is_alive():
            done.wait()

    def clear(self) -> None:
        """Make all records invalid, those of other processes too, and remove them."""
        self.flush()
        self._generation += 1
        with self._lock:
            try:
                self._folder.write(GENERATION, [str(self._generation).encode()])
            except OSError as error:
                self._stop_writing(error)
            for name in self._sizes:
                self._folder.remove(name)
            self._sizes.clear()
            self.used_bytes = 0

    def close(self) -> None:
        """Write what was queued and leave the folder; closing twice is allowed."""
        self._queue.put(None)
        self._writer.join()
        if not self._is_closed:
            self._is_closed, self._writes = True, False
            if self._readers is not None:
                self._readers.shutdown()
            self._sizes.clear()
            self._folder.close()

    def after_fork_in_child(self) -> None:
        """Write nothing: the thread is the parent's."""
        self._writes = False
        self._lock, self._readers = threading.Lock(), None
        self._has_room = threading.Condition(self._lock)

    def _read_generation(self) -> int:
        with suppress(FileNotFoundError, ValueError):
            return int(self._folder.read(GENERATION, 32))
        return 0

    def _list(self) -> None:
        """Find the files of earlier processes, and remove those that are too many."""
        for name in self._folder.abandoned():
            self._folder.remove(name)
        found = sorted(self._stored())
        for _, name, size in found:
            self._sizes[name] = size
            self.used_bytes += size
        self._make_room(0)

    def _stored(self) -> Iterator[tuple[float, str, int]]:
        for name in self._folder.names():
            if name.endswith(SUFFIX):
                with suppress(OSError):
                    facts = self._folder.status(name)
                    yield facts.st_mtime, name, facts.st_size

    def _make_room(self, size: int) -> None:
        while self._sizes and self.used_bytes + size > self.capacity:
            name, dropped = self._sizes.popitem(last=False)
            self.used_bytes -= dropped
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._folder.remove(name)
        if self.on_drop is not None:
            self.on_drop(_place_of(name))

    def _drop(self, name: str, kind: str, error: Exception) -> None:
        """Remove a record that cannot be used."""
        with self._lock:
            self.used_bytes -= self._sizes.pop(name, 0)
            self.counts[kind] += 1
            is_first = self.counts[kind] == 1
        self._remove(name)
        if is_first and kind != "missing":
            log.warning(
                "KV cache in %s: block %s is %s (%s) and is computed again; further "
                "ones are only counted", self.path, name, kind, error,
            )  # fmt: skip

    def _write_queued(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
                continue
            place, parts = item
            try:
                if self._writes:
                    self._write(place, parts)
            # Without this thread, those who wait for room or a flush would wait on.
            except Exception as error:
                self._stop_writing(error)
            with self._has_room:
                self._queued.pop(place, None)
                self._queued_bytes -= nbytes(parts)
                self._has_room.notify_all()

    def _write(self, place: Place, parts: Parts) -> None:
        own = head(self._identity, *place, self._generation)
        pieces = encoded(self._secret, own, parts)
        size, name = sum(map(len, pieces)), name_of(place)
        if size > self.capacity:
            return
        with self._lock:
            self._make_room(size)
        self._folder.write(name, pieces)
        with self._lock:
            self.used_bytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size
            self.counts["written"] += 1

    def _stop_writing(self, error: Exception) -> None:
        if self._writes:
            self._writes = False
            log.warning(
                "KV cache in %s: cannot be written (%s); blocks are not stored there "
                "any more", self.path, error,
            )  # fmt: skip


def name_of(place: Place) -> str:
    """Return the name of a block's file."""
    group, key = place
    return f"{key.hex()}.{group}{SUFFIX}"


def _place_of(name: str) -> Place:
    """Return the block of a file."""
    key, group, _ = name.split(".")
    return int(group), bytes.fromhex(key)
