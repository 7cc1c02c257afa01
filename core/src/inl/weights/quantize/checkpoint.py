"""Checkpoints of floats whose matrices are quantized when they are read."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, final

import numpy as np

from inl.checkpoints.blocks.dtypes import CHUNK, dequantize, packed_bytes
from inl.checkpoints.blocks.encode import BLOCK, encode
from inl.checkpoints.wrapped import WrappedCheckpoint
from inl.dtypes import HostArray
from inl.weights.quantize.report import KINDS, LayerError, QuantizationReport

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.checkpoint import Checkpoint

THREADS: Final = 4
"""Most threads that quantize a matrix."""


@final
class QuantizingCheckpoint(WrappedCheckpoint):
    """Presents matrices of floats as blocks; measures the error of each one it reads.

    matrices: names of the tensors to quantize; those whose rows are not whole blocks
    stay as they are.
    """

    def __init__(self, inner: Checkpoint, kind: str, matrices: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.kind, self._dtype = kind, KINDS[kind]
        shapes = {name: inner.spec(name)[1] for name in matrices}
        self._matrices = tuple(n for n, shape in shapes.items() if not _odd(shape))
        self.skipped = tuple(name for name, shape in shapes.items() if _odd(shape))
        """Matrices that stay as they are."""
        self._shapes = {name: shapes[name] for name in self._matrices}
        self._measured: dict[str, LayerError] = {}
        self.notes = self._notes()

    def _notes(self) -> tuple[str, ...]:
        then = "" if self._dtype == KINDS[self.kind] else f", rounded to {self._dtype}"
        note = (
            f"{self.kind}: {len(self._matrices)} matrices quantized to "
            f"{KINDS[self.kind]} when they are loaded{then}; embeddings, head, norms "
            "and routers stay as stored"
        )
        return (*self._inner.notes, note, *self.skip_notes())

    def skip_notes(self) -> list[str]:
        """Return a line for each width of matrices that stay as they are."""
        widths: dict[int, list[str]] = {}
        for name in self.skipped:
            widths.setdefault(self._inner.spec(name)[1][-1], []).append(name)
        return [
            f"{self.kind}: {len(names)} matrices stay as stored, because their rows of "
            f"{width} are not a multiple of {BLOCK}: {_shown(names)}"
            for width, names in widths.items()
        ]

    def rounded(self, decoded: str) -> QuantizingCheckpoint:
        if self.kind != "fp8" or decoded == "float32":
            return self
        changed = QuantizingCheckpoint(self._inner, self.kind, self._all())
        changed._dtype, changed._measured = decoded, self._measured
        changed.notes = changed._notes()
        self._measured.clear()
        return changed

    def _all(self) -> tuple[str, ...]:
        return (*self._matrices, *self.skipped)

    def names(self) -> list[str]:
        return self._inner.names()

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self._shapes:
            return self._dtype, self._shapes[name]
        return self._inner.spec(name)

    def tensor(self, name: str) -> HostArray:
        array = self._inner.tensor(name)
        return self._quantized(name, array) if name in self._shapes else array

    def quantization(self) -> QuantizationReport:
        """Return the errors of all matrices; reads those that were not read yet."""
        for name in self._matrices:
            if name not in self._measured:
                self.tensor(name)
        layers = tuple(self._measured[name] for name in self._matrices)
        return QuantizationReport(self.kind, layers)

    def _quantized(self, name: str, array: HostArray) -> HostArray:
        size = array.shape[-1]
        rows = array.data.reshape(-1, size)
        out = np.empty((len(rows), packed_bytes((size,), self._dtype)), np.uint8)
        step = max(CHUNK // size, 1)

        def quantize(start: int) -> tuple[float, float]:
            """Quantize some rows; return the squares of their change and norm."""
            part = rows[start : start + step]
            values = dequantize(HostArray(part, array.dtype, part.shape), name)
            blocks = encode(values, KINDS[self.kind])
            if blocks.dtype != self._dtype:
                blocks = encode(dequantize(blocks), self._dtype)
            out[start : start + step] = blocks.data
            with np.errstate(invalid="ignore", over="ignore"):
                return _square(dequantize(blocks) - values), _square(values)

        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            squares = [(0.0, 0.0), *pool.map(quantize, range(0, len(rows), step))]
        change, norm = (math.fsum(part) for part in zip(*squares, strict=True))
        out.flags.writeable = False
        stored = HostArray(out.reshape(*array.shape[:-1], -1), self._dtype, array.shape)
        self._measured[name] = LayerError(
            name,
            math.sqrt(change / norm) if norm else 0.0,
            packed_bytes(array.shape, array.dtype),
            out.nbytes,
            math.sqrt(norm),
        )
        return stored


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _odd(shape: tuple[int, ...]) -> bool:
    return shape[-1] % BLOCK != 0


def _square(values: NDArray[np.float32]) -> float:
    """Return the sum of squares."""
    flat = values.reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.dot(flat, flat))
