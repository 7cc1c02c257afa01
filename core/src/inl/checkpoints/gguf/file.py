"""GGUF parser: metadata and tensor entries, with every length checked before use.

Layout, little endian: magic, version, tensor count, metadata count; key-value pairs;
tensor descriptions; padding; data. Arrays stay as they lie in the file: numbers as
NumPy arrays, strings as offsets. Time and memory are linear in the file's size, and the
numbers of Python objects are bounded. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from inl.checkpoints.blocks.dtypes import packed_bytes
from inl.checkpoints.files.tensor_file import (
    MAX_TENSORS,
    Entry,
    TensorFile,
    check_apart,
    fits,
    show,
)
from inl.checkpoints.gguf.header import Header
from inl.checkpoints.gguf.types import (
    ARRAY,
    BOOL,
    KINDS,
    SCALARS,
    STRING,
    UINT32,
    UINT64,
)
from inl.errors import CheckpointError
from inl.text.strings import Strings

VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_PAIRS: Final = 1 << 16
"""Limit of the metadata keys, and of the arrays in arrays; real files have below 100.
"""
MAX_DEPTH: Final = 4
"""Nesting levels of arrays."""
MAX_RANK: Final = 4
MAX_NAME: Final = 65535
"""Bytes of the longest key or tensor name."""


class GgufFile:
    """A parsed GGUF file: ``metadata`` by key, ``tensors`` by ggml name.

    Raises :class:`CheckpointError` that names the field and the byte offset.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.file = TensorFile(path, folder)
        cursor = _Cursor(self.file)
        tensors, pairs = cursor.counts()
        self.metadata: dict[str, Any] = cursor.metadata(pairs)
        self.kinds: dict[str, int] = cursor.kinds
        """Type number of each value of the metadata."""
        self.tensors: dict[str, Entry] = cursor.tensors(
            tensors, _alignment(path, self.metadata)
        )
        check_apart(path, self.tensors)


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 8 or value & (value - 1):
        raise CheckpointError(
            f"{path}: general.alignment: found {show(value)}; "
            "accepted: a power of two from 8"
        )
    return value


class _Cursor:
    """Sequential reader of a GGUF header."""

    def __init__(self, file: TensorFile) -> None:
        self.header = Header(file)
        self.size = file.size
        self.path = file.path
        self.at = 0
        self.inner_arrays = 0
        self.kinds: dict[str, int] = {}

    def fail(self, what: str, found: object, accepted: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: {what}: found {found}; accepted: {accepted}"
        )

    def need(self, count: int, each: int, what: str) -> None:
        """Fail if ``count`` items of at least ``each`` bytes exceed the file's rest."""
        remaining = self.size - self.at
        if count * each > remaining:
            self.fail(
                what,
                f"{count} at byte {self.at}",
                f"at most {remaining // each}: the file ends at byte {self.size}",
            )

    def most(self, count: int, limit: int, what: str) -> None:
        """Fail for a count above a limit."""
        if count > limit:
            self.fail(what, count, f"at most {limit}")

    def scalar(self, kind: int, what: str) -> Any:
        form = SCALARS[kind]
        if self.at + form.size > self.size:
            self.fail(
                what,
                f"the end of the file at byte {self.size}",
                f"{form.size} bytes from byte {self.at}",
            )
        (value,) = form.unpack(self.header.bytes(self.at, self.at + form.size))
        self.at += form.size
        return self.boolean(value, what) if kind == BOOL else value

    def boolean(self, value: int, what: str) -> bool:
        if value > 1:
            self.fail(what, value, "0 or 1")
        return bool(value)

    def string(self, what: str) -> str:
        text, self.at = self.header.string(self.at, what)
        return text

    def name(self, what: str) -> str:
        start = self.at
        name = self.string(what)
        if not 1 <= self.at - start - 8 <= MAX_NAME:
            self.fail(what, show(name), f"1 to {MAX_NAME} bytes")
        return name

    def counts(self) -> tuple[int, int]:
        """Check magic and version; returns the counts of tensors and of metadata."""
        magic = self.header.bytes(0, min(4, self.size))
        if magic != b"GGUF":
            self.fail("magic", magic, "b'GGUF'")
        self.at = 4
        version = self.scalar(UINT32, "version")
        if version and version & 0xFFFF == 0:
            self.fail("version", f"{version:#010x} (big endian)", "little-endian files")
        if version not in VERSIONS:
            self.fail("version", version, f"{VERSIONS[0]} and {VERSIONS[1]}")
        tensors = self.scalar(UINT64, "tensor count")
        pairs = self.scalar(UINT64, "metadata count")
        self.need(tensors, 24, "tensor count")
        self.need(pairs, 13, "metadata count")
        self.most(tensors, MAX_TENSORS, "tensor count")
        self.most(pairs, MAX_PAIRS, "metadata count")
        return tensors, pairs

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            key = self.name(f"key of metadata {index}")
            if key in values:
                self.fail("metadata", f"{key!r} twice", "each key once")
            kind = self.scalar(UINT32, f"type of {show(key)}")
            self.kinds[key] = kind
            values[key] = self.value(kind, show(key), 0)
        return values

    def value(self, kind: int, what: str, depth: int) -> Any:
        if kind in SCALARS:
            return self.scalar(kind, what)
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what, depth)
        return self.fail(f"type of {what}", kind, "0 to 12")

    def array(self, what: str, depth: int) -> list[Any] | NDArray[Any] | Strings:
        if depth == MAX_DEPTH:
            self.fail(what, f"arrays nested deeper than {depth}", f"{depth} levels")
        kind = self.scalar(UINT32, f"element type of {what}")
        count = self.scalar(UINT64, f"length of {what}")
        if kind == STRING:
            self.need(count, 8, f"length of {what}")
            strings = self.header.strings(self.at, count, what)
            self.at = strings.stop
            return strings
        if kind == ARRAY:
            self.need(count, 12, f"length of {what}")
            self.inner_arrays += count
            self.most(self.inner_arrays, MAX_PAIRS, f"arrays in {what}")
            return [self.array(what, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            self.fail(f"element type of {what}", kind, "0 to 12")
        return self.numbers(kind, count, what)

    def numbers(self, kind: int, count: int, what: str) -> NDArray[Any]:
        form = SCALARS[kind]
        self.need(count, form.size, f"length of {what}")
        begin, self.at = self.at, self.at + count * form.size
        values = self.header.array(begin, self.at).view(np.dtype(form.format))
        if kind == BOOL:
            self.boolean(int(values.max(initial=0)), what)
            return values.view(np.bool_)
        return values

    def tensors(self, count: int, alignment: int) -> dict[str, Entry]:
        """Read the tensor descriptions; data offsets count from an aligned byte."""
        descriptions: dict[str, tuple[tuple[int, ...], str, int]] = {}
        for index in range(count):
            name = self.name(f"name of tensor {index}")
            if name in descriptions:
                self.fail("tensors", f"{name!r} twice", "each name once")
            descriptions[name] = self.description(f"tensor {show(name)}")
        begin = -(-self.at // alignment) * alignment
        return {
            name: self.entry(f"tensor {show(name)}", begin, alignment, *description)
            for name, description in descriptions.items()
        }

    def description(self, what: str) -> tuple[tuple[int, ...], str, int]:
        """Read shape, dtype and data offset of a tensor."""
        rank = self.scalar(UINT32, f"{what}: rank")
        if not 1 <= rank <= MAX_RANK:
            self.fail(f"{what}: rank", rank, f"1 to {MAX_RANK}")
        sizes = [self.scalar(UINT64, f"{what}: shape") for _ in range(rank)]
        if not fits(tuple(sizes)):
            self.fail(f"{what}: shape", sizes[::-1], "fewer than 2**48 elements")
        kind = self.scalar(UINT32, f"{what}: kind")
        if kind not in KINDS:
            known = ", ".join(f"{number} ({name})" for number, name in KINDS.items())
            self.fail(f"{what}: kind", kind, known)
        # ggml stores shapes innermost axis first.
        return (
            tuple(reversed(sizes)),
            KINDS[kind],
            self.scalar(UINT64, f"{what}: offset"),
        )

    def entry(
        self,
        what: str,
        begin: int,
        alignment: int,
        shape: tuple[int, ...],
        dtype: str,
        offset: int,
    ) -> Entry:
        """Return the entry of a tensor, checked against the file's size."""
        if offset % alignment:
            self.fail(f"{what}: offset", offset, f"multiples of {alignment}")
        try:
            size = packed_bytes(shape, dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {what}: {error}") from error
        if size and begin + offset + size > self.size:
            self.fail(
                f"{what}: {dtype} {list(shape)}",
                f"{size} bytes at offset {offset}",
                f"ends up to {max(self.size - begin, 0)}, the data in the file",
            )
        return Entry(dtype, shape, begin + offset, begin + offset + size)
