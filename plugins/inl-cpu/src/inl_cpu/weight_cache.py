"""Cache of packed weights in files that later processes map and share.

A file is named by digests of everything that determines its contents: the bytes of the
model's files, this code, and the processor. It is written under a temporary name
and renamed, so that no process sees a partial file and no lock is needed. Weights are
packed again if a file cannot be used; if a file cannot be written, the model works
without it. Files are written by a thread of low priority, while the model already
answers; the interpreter waits for it when it ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

import inl
from inl.backend.weight_cache import FileIdentity, WeightCache
from inl.cache_dir.file_digest import ChangedFile, RememberedDigests
from inl.cache_dir.packed_folder import SUFFIX, default_limit, make_room, packed_folder
from inl.cache_dir.private_folder import IS_SUPPORTED, PrivateFolder, Untrusted
from inl.checkpoints.blocks.dtypes import dequantize
from inl.dtypes import HostArray
from inl.errors import DeviceError
from inl.progress import LoadStage, ProgressReporter
from inl_cpu.abi import ABI, LANES, Flag
from inl_cpu.command_emitter import run_now
from inl_cpu.instructions import Checksum, Embedding
from inl_cpu.library import LIBRARY_PATH, Machine, open_single_threaded
from inl_cpu.matrix import requested_inputs
from inl_cpu.weight_cache_file import CacheFile, Checksums, Damaged, bytes_of, write

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_cpu.command_emitter import CommandEmitter
    from inl_cpu.matrix import Matrix

T = TypeVar("T")

VARIABLE: Final = "INL_CPU_PACKED"
"""Environment variable: the limit of the cache in GiB; "off" packs weights at each
start and writes no file."""
MIN_BYTES: Final = 16 << 20
"""Smaller models are packed faster than they are looked up, and are not cached."""
CHECKSUM_BYTES: Final = 4096
"""Bytes of a block of CHECKSUM."""
LOW_PRIORITY: Final = 19

log = logging.getLogger("inl.cpu")


class Stale(Exception):
    """A cache file does not hold the matrices that these weights pack into."""


class PackedWeightCache(WeightCache):
    """Maps the packed weights of an earlier start, or packs and saves them."""

    def __init__(self, emitter: CommandEmitter) -> None:
        self._emitter = emitter
        self._saving: threading.Thread | None = None

    def load(
        self,
        files: Mapping[Path, FileIdentity | None],
        dtype: str,
        load: Callable[[], T],
        progress: ProgressReporter | None = None,
        *,
        variant: str = "",
    ) -> T:
        progress = progress or ProgressReporter()
        limit = requested_limit()
        folder = None if limit == 0 or is_small(files) else _open_folder()
        if folder is None:
            progress.stage = LoadStage.PACKING
            return load()
        with folder:
            names = FileNames(files, f"{dtype} {variant}".rstrip(), self._emitter)
            # Hashing a model takes as long as packing it.
            hashed = names.may_exist(folder)
            name = names.complete(folder) if hashed else None
            cached = None if name is None else self._open(folder, name)
            if name is not None and cached is not None:
                try:
                    return self._load_with(cached, load)
                except Stale as reason:
                    _warn(folder, name, reason)
            progress.stage = LoadStage.PACKING
            writer = CacheWriter()
            result = self._load_with(writer, load)
            if name or not hashed:
                self._saving = threading.Thread(
                    target=_save, args=(writer, names, limit), name="inl-weight-cache"
                )
                self._saving.start()
            return result

    def finish(self) -> None:
        """Wait until the weights that were packed last are saved."""
        if self._saving is not None:
            self._saving.join()

    def _open(self, folder: PrivateFolder, name: str) -> CacheReader | None:
        try:
            checksums = partial(_checksums, self._emitter.machine)
            return CacheReader(CacheFile(folder, name, checksums), self._emitter)
        except FileNotFoundError:
            pass
        except (Damaged, Untrusted, OSError) as reason:
            _warn(folder, name, reason)
        return None

    def _load_with(self, cache: Cache, load: Callable[[], T]) -> T:
        self._emitter.weight_cache = cache
        try:
            result = load()
            cache.finish()
        finally:
            self._emitter.weight_cache = None
        return result


def _checksums(
    machine: Machine, data: NDArray[np.uint8], key: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    sums = np.empty(data.nbytes // CHECKSUM_BYTES, np.uint64)
    run_now(machine, Checksum(bytes=data.nbytes, x=data, key=key, sums=sums))
    return sums


def _save(writer: CacheWriter, names: FileNames, limit: int | None) -> None:
    """Save packed weights in a thread that yields the processor to all others."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
    folder = _open_folder()
    if folder is None:
        return
    with folder:
        name = names.complete(folder, threads=1)
        if name is not None:
            # A pool of its own: that of the backend computes answers meanwhile.
            checksums = partial(_checksums, open_single_threaded())
            writer.save(folder, name, limit, checksums)


class Cache:
    """Interface to the cache while weights are loaded."""

    def find(self, matrix: Matrix, size: int) -> NDArray[np.uint8] | None:
        """Return the packed bytes of a matrix, or ``None`` if it must be packed."""
        raise NotImplementedError

    def compare(
        self, matrix: Matrix, source: HostArray, first: int, flags: int
    ) -> None:
        """Check a cached matrix against source rows; raises :class:`Stale`.

        Compares a few rows of the first matrix of each shape. With equal file names
        only the packing code can differ, which treats all layers alike.
        """

    def finish(self) -> None:
        """Check that every cached matrix was used; raises :class:`Stale`."""


class CacheReader(Cache):
    """Returns the matrices of a file in the order in which they were written."""

    def __init__(self, file: CacheFile, emitter: CommandEmitter) -> None:
        self._file, self._emitter = file, emitter
        self._remaining = list(reversed(file.parts))
        self._compared: set[tuple[int, ...]] = set()

    def find(self, matrix: Matrix, size: int) -> NDArray[np.uint8]:
        part = self._remaining.pop() if self._remaining else None
        if part is None or part.what != signature(matrix) or part.size != size:
            raise Stale(f"holds other matrices than {signature(matrix)}")
        return self._file.view(part)

    def compare(
        self, matrix: Matrix, source: HostArray, first: int, flags: int
    ) -> None:
        count = source.shape[0]
        shape = (*signature(matrix), first, count, flags)
        if shape in self._compared:
            return
        self._compared.add(shape)
        rows = np.array(sorted({0, count // 2, count - 1}), np.int32)
        interleaved = rows // LANES * 2 * LANES + rows % LANES
        ids = first + (interleaved if flags & Flag.INTERLEAVE else rows)
        values = np.empty((len(rows), matrix.columns), np.float32)
        self._emitter.emit(
            Embedding(
                tokens=len(rows),
                y_stride=matrix.columns,
                ids=ids.astype(np.int32),
                matrix=matrix,
                y=values,
            )
        )
        sampled = HostArray(source.rows(rows), source.dtype, values.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = dequantize(sampled).astype(np.float32)
            # Values that were not quantized are rounded to bfloat16.
            tolerance = 1e-6 if matrix.packing.quantized else 2**-7
            close = np.abs(values - expected) <= tolerance * np.abs(expected)
        if not (close | (values == expected) | np.isnan(values + expected)).all():
            raise Stale("holds other values than the model")

    def finish(self) -> None:
        if self._remaining:
            raise Stale(f"holds {len(self._remaining)} more matrices than the model")


class CacheWriter(Cache):
    """Collects the matrices that are packed, and writes them to a file."""

    def __init__(self) -> None:
        self._matrices: list[Matrix] = []

    def find(self, matrix: Matrix, size: int) -> None:  # noqa: ARG002
        self._matrices.append(matrix)

    def save(
        self,
        folder: PrivateFolder,
        name: str,
        limit: int | None,
        checksums: Checksums,
    ) -> None:
        """Write all matrices; logs an I/O error."""
        blocks = [(signature(each), each.data) for each in self._matrices]
        try:
            make_room(folder, bytes_of(blocks), limit or default_limit(folder))
            write(folder, name, blocks, checksums)
        except OSError as reason:
            _not_cached(folder.path, reason)
        self._matrices.clear()


def _open_folder() -> PrivateFolder | None:
    """The folder of packed weights, or ``None`` with a logged reason."""
    if not IS_SUPPORTED:
        return None
    path = packed_folder()
    try:
        return PrivateFolder(path, create=True)
    except Untrusted as reason:
        log.warning("%s: %s; packed weights are not cached", path, reason)
    except OSError as reason:
        _not_cached(path, reason)
    return None


def _warn(folder: PrivateFolder, name: str, reason: Exception) -> None:
    log.warning("%s: %s; the weights are packed again", folder.path / name, reason)


def _not_cached(path: Path, reason: Exception) -> None:
    log.info("%s: packed weights are not cached: %s", path, reason)


def requested_limit() -> int | None:
    """Read INL_CPU_PACKED: bytes of the cache, 0 if it is off, ``None`` by default.

    Raises :class:`DeviceError` if the value is not accepted.
    """
    value = os.environ.get(VARIABLE, "")
    if value in ("", "off"):
        return 0 if value else None
    with suppress(ValueError, OverflowError):
        limit = int(float(value) * 2**30)
        if limit > 0:
            return limit
    raise DeviceError(
        f"environment variable {VARIABLE}: found {value!r:.80}, accepted: off, or a "
        "number of GiB"
    )


def is_small(files: Mapping[Path, Any]) -> bool:
    """Return whether the files are not worth a cache, or cannot be read."""
    try:
        return sum(path.stat().st_size for path in files) < MIN_BYTES
    except OSError:
        return True


def signature(matrix: Matrix) -> tuple[int, ...]:
    """Packing and shape of a matrix."""
    return (*matrix.packing, matrix.rows, matrix.columns)


class FileNames:
    """Names of the file of a model's weights: what determines them, as two digests.

    The first is of what is known without reading the model.
    """

    def __init__(
        self,
        files: Mapping[Path, FileIdentity | None],
        dtype: str,
        emitter: CommandEmitter,
    ) -> None:
        self._files = {
            path: opened or FileIdentity.of(path.stat())
            for path, opened in files.items()
        }
        sizes = [opened.size for opened in self._files.values()]
        machine = emitter.machine.isa
        facts = inl.__version__, ABI, machine, dtype, requested_inputs(), sizes
        self._start = _digest(facts)

    def may_exist(self, folder: PrivateFolder) -> bool:
        """Whether the folder has a file for these facts, maybe of another model."""
        return any(name.startswith(self._start) for name in folder.names())

    def complete(self, folder: PrivateFolder, **threads: int) -> str | None:
        """The name, or ``None`` with a logged reason. Hashes files that are new.

        threads: of :class:`~inl.cache_dir.file_digest.RememberedDigests`. There is no
        name if a file has changed since it was opened.
        """
        try:
            digests = RememberedDigests(folder, **threads)
            contents = [digests.digest(LIBRARY_PATH)]
            contents += [digests.digest(*each) for each in self._files.items()]
        except ChangedFile as reason:
            log.warning("%s; its packed weights are not cached", reason)
        except OSError as reason:
            _not_cached(folder.path, reason)
        else:
            return f"{self._start}-{_digest(contents)}{SUFFIX}"
        return None


def _digest(facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
