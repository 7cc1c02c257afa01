"""Packed weights from one start to the next, in files that programs map and share.

A file is named by the digest of all that its bytes follow from. It is written under
another name first, so that no process ever sees a part of one, and nobody waits for
anybody. What cannot be used is packed again; what cannot be written is done without.
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
from inl.weights.hub import cache_folder
from inl.weights.progress import LoadStage, ProgressReporter
from inl.weights.quant import dequantize
from inl_cpu.abi import ABI, LANES, Flag, Opcode
from inl_cpu.library import PLACE
from inl_cpu.matrix import inputs_asked_for
from inl_cpu.weight_cache_file import Damaged, KeptFile, tidy, write

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_cpu.command_emitter import Stage
    from inl_cpu.matrix import Matrix

T = TypeVar("T")

VARIABLE: Final = "INL_CPU_PACKED"
"""Environment variable: "off" packs at each start and keeps nothing."""
LEAST: Final = 16 << 20
"""Bytes that take longer to pack than to look for."""
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
SMALL: Final = SAMPLES * SAMPLE_BYTES
"""Bytes of a file that is read whole for its digest."""

log = logging.getLogger("inl.cpu")


class Stale(Exception):
    """What is kept is not what these weights are packed into."""


class KeptMatrices(WeightCache):
    """Maps what an earlier start packed; else packs, and keeps it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def load(
        self,
        files: Sequence[Path],
        dtype: str,
        load: Callable[[], T],
        progress: ProgressReporter | None = None,
    ) -> T:
        progress = progress or ProgressReporter()
        if not files or not is_on():
            progress.stage = LoadStage.PACKING
            return load()
        place = cache_folder() / "packed" / name_of(files, dtype, self._stage)
        try:
            return self._with(Taken(KeptFile(place), self._stage), load)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (Damaged, Stale, OSError) as reason:
            log.warning("%s: %s; the weights are packed again", place, reason)
        progress.stage = LoadStage.PACKING
        written = Written()
        result = self._with(written, load)
        progress.stage = LoadStage.SAVING
        written.save(place, progress)
        return result

    def _with(self, keeper: Keeper, load: Callable[[], T]) -> T:
        self._stage.kept = keeper
        try:
            result = load()
            keeper.finish()
        finally:
            self._stage.kept = None
        return result


class Keeper:
    """What a stage asks while weights are loaded."""

    def find(self, matrix: Matrix, size: int) -> NDArray[np.uint8] | None:
        """The bytes of a matrix, or ``None`` where it is to be packed."""
        raise NotImplementedError

    def compare(
        self, matrix: Matrix, source: HostArray, first: int, flags: int
    ) -> None:
        """Look whether a matrix that was found holds these rows.

        Some of them, of the first matrix of each shape: what could differ, though the
        file's name does not, is code, which does the same to all layers.
        """

    def finish(self) -> None:
        """All weights are loaded."""


class Taken(Keeper):
    """Hands out the parts of a file in the order in which they were kept."""

    def __init__(self, file: KeptFile, stage: Stage) -> None:
        self._file, self._stage = file, stage
        self._left = list(reversed(file.parts))
        self._compared: set[tuple[int, ...]] = set()

    def find(self, matrix: Matrix, size: int) -> NDArray[np.uint8]:
        part = self._left.pop() if self._left else None
        if part is None or part.what != signature(matrix) or part.size != size:
            raise Stale(f"holds other matrices than {signature(matrix)}")
        return self._file.view(part)

    def compare(
        self, matrix: Matrix, source: HostArray, first: int, flags: int
    ) -> None:
        count = source.shape[0]
        kind = (*signature(matrix), first, count, flags)
        if kind in self._compared:
            return
        self._compared.add(kind)
        rows = np.array(sorted({0, count // 2, count - 1}), np.int32)
        apart = rows // LANES * 2 * LANES + rows % LANES
        places = first + (apart if flags & Flag.INTERLEAVE else rows)
        found = np.empty((len(rows), matrix.columns), np.float32)
        dims = [len(rows), matrix.columns]
        at = places.astype(np.int32)
        self._stage.emit(Opcode.EMBEDDING, dims, [at, matrix, found], [1.0])
        some = HostArray(source.data[rows], source.dtype, found.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = dequantize(some).astype(np.float32)
            # Numbers that were not quantized are rounded to bfloat16.
            near = 1e-6 if matrix.packing.quantized else 2**-7
            same = np.abs(found - expected) <= near * np.abs(expected)
        if not (same | (found == expected) | (np.isnan(found + expected))).all():
            raise Stale("holds other numbers than the model")

    def finish(self) -> None:
        if self._left:
            raise Stale(f"holds {len(self._left)} matrices more")


class Written(Keeper):
    """Notes what is packed, and writes it to a file."""

    def __init__(self) -> None:
        self._matrices: list[Matrix] = []

    def find(self, matrix: Matrix, size: int) -> None:  # noqa: ARG002
        self._matrices.append(matrix)

    def save(self, place: Path, progress: ProgressReporter) -> None:
        """Write all of them, unless they are few; where that fails, go on without."""
        if sum(each.data.nbytes for each in self._matrices) < LEAST:
            return
        try:
            blocks = [(signature(each), each.data) for each in self._matrices]
            write(place, blocks, progress)
            tidy(place)
        except OSError as reason:
            log.info("%s: packed weights are not kept: %s", place.parent, reason)
        self._matrices.clear()


def is_on() -> bool:
    """Read INL_CPU_PACKED; raises :class:`DeviceError` for what it does not accept."""
    found = os.environ.get(VARIABLE, "")
    if found not in ("", "off"):
        raise DeviceError(
            f"environment variable {VARIABLE}: found {found!r:.80}, accepted: off"
        )
    return not found


def signature(matrix: Matrix) -> tuple[int, ...]:
    """What a matrix is, its numbers aside."""
    return (*matrix.packing, matrix.rows, matrix.columns)


def name_of(files: Sequence[Path], dtype: str, stage: Stage) -> str:
    """Digest of what packed weights follow from: the model, this code, the processor.

    Of large files only their size, time and some pages are looked at; a few rows of
    each matrix are compared later.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    add(inl.__version__, ABI, stage.machine.isa, dtype, inputs_asked_for())
    for file in (PLACE, *files):
        with file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
            # The library is made anew with any time; a model has no other name.
            add(facts.st_size, facts.st_mtime_ns if file != PLACE else 0)
            apart = max(SAMPLE_BYTES, facts.st_size // SAMPLES)
            whole = facts.st_size <= SMALL or file == PLACE
            for at in range(0, 1 if whole else facts.st_size, apart):
                opened.seek(at)
                digest.update(opened.read(-1 if whole else SAMPLE_BYTES))
    return f"{digest.hexdigest()}.tiles"
