"""Writes a GGUF file of a kind, one tensor at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inl.checkpoints.blocks.dtypes import BLOCKS, CHUNK, convert, dequantize
from inl.checkpoints.blocks.encode_gguf import encode_gguf
from inl.checkpoints.files.new_file import check_space, new_file
from inl.checkpoints.gguf.writer import GgufWriter, TensorSpec
from inl.convert.gguf_fields import BLOCKS_VERSION
from inl.convert.gguf_kinds import KINDS, GgufKind, dtypes, is_matrix
from inl.dtypes import FLOATS, SIZES, HostArray
from inl.errors import CheckpointError
from inl.weights.finite import check_finite
from inl.weights.quantize.report import LayerError, QuantizationReport

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.convert.gguf_source import GgufSource

    Importance = Mapping[str, NDArray[np.float32]]
    Report = Callable[[int, int], None]

THREADS: Final = 8
"""Most threads that quantize a matrix."""


class Written(NamedTuple):
    """A file that was written."""

    path: Path
    bytes: int
    quantization: QuantizationReport
    """Errors of the matrices whose dtype changed."""


def write_gguf(
    source: GgufSource,
    path: Path,
    kind: str | None,
    *,
    importance: Importance | None = None,
    requantize: bool = False,
    progress: Report | None = None,
) -> Written:
    """Write ``source`` to ``path``; matrices in the dtypes of ``kind``.

    kind: one of :data:`~inl.convert.gguf_kinds.KINDS`; ``None`` keeps dtypes.
    importance: mean squares of the inputs of matrices, by name. requantize: accept
    matrices that are quantized already. progress: called with bytes (done, total).
    Raises :class:`CheckpointError`; the file appears only when it is complete.
    """
    form = None if kind is None else KINDS[kind]
    wanted = dtypes(form, source.tensors, source.metadata)
    if not requantize:
        _refuse_quantized(source, wanted, path)
    _check_names(source, importance)
    specs = {
        name: TensorSpec(wanted[name], tensor.shape)
        for name, tensor in source.tensors.items()
    }
    total = sum(spec.bytes for spec in specs.values())
    check_space(path, total)
    metadata = dict(source.metadata) | _file_type(form, wanted)
    # Small tensors that the config depends on come first, so that it can be checked.
    names = sorted(specs, key=lambda name: not name.startswith("rope_"))
    measured: list[LayerError] = []
    with new_file(path) as file, ThreadPoolExecutor(threads()) as pool:
        writer = GgufWriter(file, metadata, {name: specs[name] for name in names})
        writer.extend()
        done, checked = 0, source.check is None
        for name in names:
            if not checked and not name.startswith("rope_"):
                file.flush()
                assert source.check is not None, "it is not checked yet"
                source.check(Path(file.name))
                checked = True
            array = source.tensors[name].read()
            weights = None if importance is None else importance.get(name)
            result, error = _converted(array, wanted[name], name, weights, pool)
            writer.write(name, result)
            if error is not None and is_matrix(name, source.tensors[name]):
                measured.append(error)
            done += specs[name].bytes
            if progress is not None:
                progress(done, total)
    report = QuantizationReport(kind or "as stored", tuple(measured))
    return Written(path, writer.size, report)


def threads() -> int:
    """Return the number of threads that quantize."""
    return min(THREADS, os.cpu_count() or 1)


def _file_type(form: GgufKind | None, wanted: Mapping[str, str]) -> dict[str, int]:
    if form is None:
        used = set(wanted.values()) & set(FLOATS)
        names = {"bfloat16": 32, "float16": 1, "float32": 0}
        number = next((names[one] for one in names if one in used), 0)
        return {} if set(wanted.values()) - used else {"general.file_type": number}
    return {"general.file_type": form.file_type, "general.quantization_version":
            BLOCKS_VERSION}  # fmt: skip


def _refuse_quantized(
    source: GgufSource, wanted: Mapping[str, str], path: Path
) -> None:
    for name, tensor in source.tensors.items():
        if tensor.dtype not in (*FLOATS, wanted[name]) and tensor.dtype in BLOCKS:
            raise CheckpointError(
                f"{path}: tensor {name!r} of the input: found {tensor.dtype}, which is "
                "quantized already; accepted: a model in float32, bfloat16 or float16, "
                "or --allow-requantize, which adds a second error"
            )


def _check_names(source: GgufSource, importance: Importance | None) -> None:
    if importance is not None and not set(importance) & set(source.tensors):
        raise CheckpointError(
            f"imatrix: found {len(importance)} matrices, such as "
            f"{min(importance)!r}, none of which is in the model; accepted: the "
            "imatrix of this model"
        )


def _converted(
    array: HostArray,
    dtype: str,
    name: str,
    importance: NDArray[np.float32] | None,
    pool: ThreadPoolExecutor,
) -> tuple[HostArray, LayerError | None]:
    """Return a tensor in another dtype, and the error of the change."""
    check_finite(array, f"tensor {name!r}")
    if array.dtype == dtype:
        return array, None
    if dtype in SIZES:
        result = convert(array, dtype, name)
        if dtype == "float16" and not np.isfinite(result.data).all():
            raise CheckpointError(
                f"tensor {name!r}: found numbers above 65504, the largest of float16; "
                "accepted: --kind bf16"
            )
        return result, None
    elements, size = BLOCKS[dtype]
    columns = array.shape[-1]
    rows = array.data.reshape(array.size // columns, -1)
    out = np.empty((len(rows), columns // elements * size), np.uint8)
    weights = _rows_of(importance, array.shape, name)

    def quantize(part: tuple[int, int]) -> tuple[float, float]:
        """Quantize some rows; return the squares of their change and norm."""
        start, stop = part
        piece = HostArray(rows[start:stop], array.dtype, (stop - start, columns))
        values = dequantize(piece, name)
        each = len(rows) if weights is None else len(rows) // len(weights)
        chosen = None if weights is None else weights[start // each]
        blocks = encode_gguf(values, dtype, chosen)
        check_finite(blocks, f"tensor {name!r}: in {dtype}")
        out[start:stop] = blocks.data
        return _square(dequantize(blocks) - values), _square(values)

    matrices = 1 if weights is None else len(weights)
    parts = _parts(len(rows), matrices, max(CHUNK // columns, 1))
    squares = [(0.0, 0.0), *pool.map(quantize, parts)]
    change, norm = (math.fsum(part) for part in zip(*squares, strict=True))
    error = math.sqrt(change / norm) if norm else 0.0
    layer = LayerError(name, error, array.data.nbytes, out.nbytes, math.sqrt(norm))
    shaped = out.reshape(*array.shape[:-1], -1)
    return HostArray(shaped, dtype, array.shape), layer


def _parts(rows: int, matrices: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, each within one matrix."""
    each = rows // matrices
    for first in range(0, rows, each):
        for start in range(first, first + each, step):
            yield start, min(start + step, first + each)


def _rows_of(
    importance: NDArray[np.float32] | None, shape: tuple[int, ...], name: str
) -> NDArray[np.float32] | None:
    """Return the importance of the columns of each matrix: [1 or E, K]."""
    if importance is None:
        return None
    columns, experts = shape[-1], math.prod(shape[:-2])
    if importance.size not in (columns, columns * experts):
        raise CheckpointError(
            f"imatrix: {name!r}: found {importance.size} numbers; accepted: {columns}, "
            "one for each column, as in the imatrix of this model"
        )
    weights = importance.reshape(-1, columns)
    # Columns that are never used may have any error, but not all of them.
    used = weights.max(1, keepdims=True)
    return np.where(used > 0, weights, 1).astype(np.float32)


def _square(values: NDArray[np.float32]) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))
