"""Safetensors parser: a JSON header followed by the tensors' data.

Supports bfloat16 without a framework. Layout: uint64 length
of the header, the header, then the data, from whose start ``data_offsets`` count.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from inl.checkpoints.files.json_text import parse_json
from inl.checkpoints.files.tensor_file import (
    MAX_TENSORS,
    Entry,
    TensorFile,
    check_apart,
    fits,
    in_order,
    plain_bytes,
    show,
)
from inl.dtypes import E8M0
from inl.errors import CheckpointError

DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": E8M0,
}
"""Dtype names by the format's names."""

MAX_HEADER: Final = 100_000_000
"""Size limit of the header in bytes, as in the reference implementation."""

MAX_RANK: Final = 8


class Header(NamedTuple):
    """The tensors of a file, and the texts that its writer added."""

    entries: dict[str, Entry]
    metadata: Mapping[str, str]


def read_header(file: TensorFile) -> Header:
    """Return the entry of every tensor in a safetensors file, and its metadata.

    Checks lengths and offsets against the file and sizes against shape and dtype;
    tensors must cover the data without overlaps or holes. Raises
    :class:`CheckpointError` that names the tensor and the field.
    """
    path = file.path
    length = int.from_bytes(file.read(0, min(8, file.size)), "little")
    if file.size < 8 or length > min(MAX_HEADER, file.size - 8):
        raise CheckpointError(
            f"{path}: header length: found {length} in a file of {file.size} bytes; "
            f"accepted: 2 to {min(MAX_HEADER, max(file.size - 8, 2))}"
        )
    begin = 8 + length
    text, where = file.read(8, begin), f"{path}: header"
    header = parse_json(text, where, file.size, unique_keys=True)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(
            f"{path}: header: found {len(header)} tensors; accepted: at most "
            f"{MAX_TENSORS}"
        )
    metadata = header.pop("__metadata__", {})
    _check_metadata(path, metadata)
    entries = {
        name: _entry(f"{path}: tensor {name!r}", fields, begin, file.size)
        for name, fields in header.items()
    }
    check_apart(path, entries)
    _check_whole(path, entries, begin, file.size)
    return Header(entries, metadata)


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise CheckpointError(
            f"{path}: header field '__metadata__': found {show(metadata)}; "
            "accepted: an object of strings"
        )


def _entry(where: str, fields: Any, begin: int, size: int) -> Entry:
    """Convert the ``{dtype, shape, data_offsets}`` of a tensor to an entry."""
    if not isinstance(fields, Mapping) or set(fields) != {
        "dtype",
        "shape",
        "data_offsets",
    }:
        raise CheckpointError(
            f"{where}: found {show(fields)}; "
            "accepted: an object with dtype, shape and data_offsets"
        )
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where}: dtype: found {show(dtype)}; accepted: {', '.join(DTYPES)}"
        )
    shape = _integers(fields["shape"])
    if shape is None or len(shape) > MAX_RANK or not fits(shape):
        raise CheckpointError(
            f"{where}: shape: found {show(fields['shape'])}; "
            f"accepted: at most {MAX_RANK} integers from 0, fewer than 2**48 elements"
        )
    offsets = _integers(fields["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where}: data_offsets: found {show(fields['data_offsets'])}; "
            "accepted: [begin, end] with 0 <= begin <= end"
        )
    start, stop = begin + offsets[0], begin + offsets[1]
    if stop > size:
        raise CheckpointError(
            f"{where}: data_offsets: found {list(offsets)}, but the file holds "
            f"{size - begin} bytes of data; accepted: ends up to {size - begin}"
        )
    entry = Entry(DTYPES[dtype], shape, start, stop)
    needed = plain_bytes(shape, entry.dtype)
    if needed != stop - start:
        raise CheckpointError(
            f"{where}: data_offsets: found {stop - start} bytes for {dtype} "
            f"{list(shape)}; accepted: {needed}"
        )
    return entry


def _integers(values: Any) -> tuple[int, ...] | None:
    """Return a list of integers from 0 as a tuple, else ``None``."""
    if not isinstance(values, list):
        return None
    # type(), not isinstance(): True is not accepted.
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        return None
    return tuple(values)


def _check_whole(
    path: Path, entries: Mapping[str, Entry], begin: int, size: int
) -> None:
    """Raise for bytes outside all tensors, which could hide another kind of file."""
    end = begin
    for name, entry in in_order(entries):
        if entry.start != end:
            raise CheckpointError(
                f"{path}: tensor {name!r}: begins at byte {entry.start}, but the "
                f"tensor before it ends at {end}; accepted: no hole between tensors"
            )
        end = entry.stop
    if end != size:
        raise CheckpointError(
            f"{path}: the last tensor ends at byte {end}; accepted: {size}, "
            "the end of the file"
        )
