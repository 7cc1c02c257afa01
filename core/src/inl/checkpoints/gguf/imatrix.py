"""Importance matrices of llama.cpp: the mean square of each input of a matrix.

Two formats: ``.dat`` files, and GGUF files with sums and counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from inl.checkpoints.files.tensor_file import TensorFile, show
from inl.checkpoints.gguf.file import GgufFile
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUMS, COUNTS = ".in_sum2", ".counts"
"""Suffixes of the tensors of GGUF files."""
MAX_ENTRIES: Final = 1 << 17
MAX_NAME: Final = 65535


def read_imatrix(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the importance of the columns of each matrix, by its name in GGUF files.

    A value has [K] numbers, or [E * K] for a matrix of E experts; they are the mean
    squares of inputs. Raises :class:`CheckpointError`.
    """
    file = TensorFile(path)
    try:
        magic = file.read(0, min(4, file.size))
        found = _from_gguf(path) if magic == b"GGUF" else _from_dat(file)
    finally:
        file.close()
    for name, values in found.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise CheckpointError(
                f"{path}: {name!r}: found negative numbers, NaN or infinity; accepted: "
                "means of squares"
            )
    return found


def _from_gguf(path: Path) -> dict[str, NDArray[np.float32]]:
    gguf = GgufFile(path)
    try:
        found = {
            name.removesuffix(SUMS): _means(gguf, name.removesuffix(SUMS))
            for name in gguf.tensors
            if name.endswith(SUMS)
        }
    finally:
        gguf.file.close()
    if not found:
        raise CheckpointError(
            f"{path}: found no tensors named *{SUMS}; accepted: an importance matrix "
            "of llama-imatrix"
        )
    return found


def _means(gguf: GgufFile, matrix: str) -> NDArray[np.float32]:
    counted = gguf.tensors.get(matrix + COUNTS)
    if counted is None:
        raise CheckpointError(
            f"{gguf.file.path}: tensor {matrix + COUNTS!r}: not found; accepted: one "
            f"beside each {SUMS}"
        )
    counts = gguf.file.array(counted).data
    sums = gguf.file.array(gguf.tensors[matrix + SUMS]).data.astype(np.float32)
    sums = sums.reshape(counts.size, -1)
    counts = counts.reshape(-1, 1)
    # Experts that no token reached have no mean: every column counts the same.
    means = np.where(counts > 0, sums / np.maximum(counts, 1), 1)
    return np.asarray(means, np.float32).reshape(-1)


def _from_dat(file: TensorFile) -> dict[str, NDArray[np.float32]]:
    """Read entries of name, number of calls and values times that number."""
    cursor = _Cursor(file)
    found: dict[str, NDArray[np.float32]] = {}
    for _ in range(cursor.count("number of entries", MAX_ENTRIES)):
        length = cursor.count("length of a name", MAX_NAME)
        name = cursor.bytes(length).decode("utf-8", "replace")
        calls = max(cursor.integer(), 1)
        values = cursor.count(f"{show(name)}: number of values", file.size // 4)
        data = np.frombuffer(cursor.bytes(4 * values), "<f4")
        found[name] = np.asarray(data / calls, np.float32)
    return found


class _Cursor:
    """Sequential reader of little-endian int32 and bytes."""

    def __init__(self, file: TensorFile) -> None:
        self._file, self._at = file, 0

    def bytes(self, count: int) -> bytes:
        stop = self._at + count
        if stop > self._file.size:
            raise CheckpointError(
                f"{self._file.path}: found its end at byte {self._file.size}, expected "
                f"{count} bytes from {self._at}; accepted: an importance matrix of "
                "llama-imatrix, .dat or .gguf"
            )
        data = self._file.read(self._at, stop)
        self._at = stop
        return data

    def integer(self) -> int:
        return int.from_bytes(self.bytes(4), "little", signed=True)

    def count(self, what: str, most: int) -> int:
        number = self.integer()
        if not 1 <= number <= most:
            raise CheckpointError(
                f"{self._file.path}: {what}: found {number}; accepted: 1 to {most}, as "
                "in an importance matrix of llama-imatrix"
            )
        return number
