"""Cache of packed weights in files that later processes map and share.

A file is named by the digest of everything that determines its contents. It is written
under a temporary name and renamed, so that no process sees a partial file and no lock
is needed. Weights are packed again if a file cannot be used; if a file cannot be
written, loading continues without it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

import inl
from inl.backend.weight_cache import WeightCache
from inl.dtypes import HostArray
from inl.errors import DeviceError
from inl.progress import LoadStage, ProgressReporter
from inl.weights.hub import cache_folder
from inl.weights.quant import dequantize
from inl_cpu.abi import ABI, LANES, Flag
from inl_cpu.instructions import Embedding
from inl_cpu.library import LIBRARY_PATH
from inl_cpu.matrix import requested_inputs
from inl_cpu.weight_cache_file import CacheFile, Damaged, evict, write

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_cpu.command_emitter import CommandEmitter
    from inl_cpu.matrix import Matrix

T = TypeVar("T")

VARIABLE: Final = "INL_CPU_PACKED"
"""Environment variable: "off" packs weights at each start and writes no file."""
MIN_BYTES: Final = 16 << 20
"""Smaller weights are packed faster than they are looked up, and are not cached."""
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
SMALL: Final = SAMPLES * SAMPLE_BYTES
"""Bytes up to which the whole file is read for its digest."""

log = logging.getLogger("inl.cpu")


class Stale(Exception):
    """A cache file does not hold the matrices that these weights pack into."""


class PackedWeightCache(WeightCache):
    """Maps the packed weights of an earlier start, or packs and saves them."""

    def __init__(self, emitter: CommandEmitter) -> None:
        self._emitter = emitter

    def load(
        self,
        files: Sequence[Path],
        dtype: str,
        load: Callable[[], T],
        progress: ProgressReporter | None = None,
    ) -> T:
        progress = progress or ProgressReporter()
        if not files or not is_enabled():
            progress.stage = LoadStage.PACKING
            return load()
        path = cache_folder() / "packed" / file_name(files, dtype, self._emitter)
        try:
            return self._load_with(CacheReader(CacheFile(path), self._emitter), load)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (Damaged, Stale, OSError) as reason:
            log.warning("%s: %s; the weights are packed again", path, reason)
        progress.stage = LoadStage.PACKING
        writer = CacheWriter()
        result = self._load_with(writer, load)
        progress.stage = LoadStage.SAVING
        writer.save(path, progress)
        return result

    def _load_with(self, cache: Cache, load: Callable[[], T]) -> T:
        self._emitter.weight_cache = cache
        try:
            result = load()
            cache.finish()
        finally:
            self._emitter.weight_cache = None
        return result


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
        sampled = HostArray(source.data[rows], source.dtype, values.shape)
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

    def save(self, path: Path, progress: ProgressReporter) -> None:
        """Write all matrices, unless they are small; logs an I/O error."""
        if sum(each.data.nbytes for each in self._matrices) < MIN_BYTES:
            return
        try:
            blocks = [(signature(each), each.data) for each in self._matrices]
            write(path, blocks, progress)
            evict(path)
        except OSError as reason:
            log.info("%s: packed weights are not cached: %s", path.parent, reason)
        self._matrices.clear()


def is_enabled() -> bool:
    """Read INL_CPU_PACKED; raises :class:`DeviceError` if it is not accepted."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "off"):
        raise DeviceError(
            f"environment variable {VARIABLE}: found {value!r:.80}, accepted: off"
        )
    return not value


def signature(matrix: Matrix) -> tuple[int, ...]:
    """Packing and shape of a matrix."""
    return (*matrix.packing, matrix.rows, matrix.columns)


def file_name(files: Sequence[Path], dtype: str, emitter: CommandEmitter) -> str:
    """Digest of what determines packed weights: the model, this code, the processor.

    Large files enter with their size, time and 64 samples of 4 KiB; a few rows of each
    matrix are compared later.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    add(inl.__version__, ABI, emitter.machine.isa, dtype, requested_inputs())
    for path in (LIBRARY_PATH, *files):
        is_library = path == LIBRARY_PATH
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            # A rebuilt library has another time with the same contents.
            add(facts.st_size, 0 if is_library else facts.st_mtime_ns)
            step = max(SAMPLE_BYTES, facts.st_size // SAMPLES)
            whole = facts.st_size <= SMALL or is_library
            for offset in range(0, 1 if whole else facts.st_size, step):
                file.seek(offset)
                digest.update(file.read(-1 if whole else SAMPLE_BYTES))
    return f"{digest.hexdigest()}.tiles"
