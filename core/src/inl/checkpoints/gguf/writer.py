"""Writer of GGUF files, version 3: metadata, descriptions of tensors, then their data.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from inl.checkpoints.blocks.dtypes import packed_bytes
from inl.checkpoints.gguf.types import ARRAY, BOOL, KINDS, SCALARS, STRING
from inl.dtypes import HostArray
from inl.text.strings import is_strings

VERSION: Final = 3
ALIGNMENT: Final = 32
NUMBERS: Final = {dtype: number for number, dtype in KINDS.items()}
"""Tensor type numbers by dtype name."""
TYPES: Final = {
    np.dtype(form.format): kind for kind, form in SCALARS.items() if kind != BOOL
} | {np.dtype(np.bool_): BOOL}
"""Metadata types by dtype."""


class TensorSpec(NamedTuple):
    """A tensor to be written: dtype and shape, as NumPy orders axes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return packed_bytes(self.shape, self.dtype)


class GgufWriter:
    """Writes the header of a file at once, and its tensors in any order.

    metadata: values by key. A Python ``int`` is a uint32 and a ``float`` a float32;
    scalars and arrays of NumPy keep their types.
    """

    def __init__(
        self,
        file: BinaryIO,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, TensorSpec],
    ) -> None:
        self._file, self._tensors = file, dict(tensors)
        self._offsets: dict[str, int] = {}
        at = 0
        for name, spec in tensors.items():
            self._offsets[name] = at
            at = _aligned(at + spec.bytes)
        head = self._header(metadata)
        self._data = _aligned(len(head))
        self.size = self._data + at
        """Bytes of the whole file."""
        file.write(head)

    def _header(self, metadata: Mapping[str, Any]) -> bytes:
        parts = [struct.pack("<4sIQQ", b"GGUF", VERSION, len(self._tensors),
                             len(metadata))]  # fmt: skip
        for key, value in metadata.items():
            kind, data = _value(value)
            parts += [_string(key), struct.pack("<I", kind), data]
        for name, spec in self._tensors.items():
            sizes = spec.shape[::-1]
            form = f"<I{len(sizes)}QIQ"
            number, offset = NUMBERS[spec.dtype], self._offsets[name]
            parts += [_string(name), struct.pack(form, len(sizes), *sizes, number,
                                                 offset)]  # fmt: skip
        return b"".join(parts)

    def extend(self) -> None:
        """Give the file its size, before all of its tensors are written."""
        self._file.truncate(self.size)
        self._file.flush()

    def write(self, name: str, array: HostArray) -> None:
        """Write the data of a tensor."""
        spec = self._tensors[name]
        assert (array.dtype, array.shape) == spec, "as announced"
        self._file.seek(self._data + self._offsets[name])
        self._file.write(np.ascontiguousarray(array.data).data.cast("B"))


def _value(value: Any) -> tuple[int, bytes]:
    """Return type and bytes of a value of metadata."""
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, np.ndarray):
        kind = TYPES[value.dtype.newbyteorder("<")]
        return ARRAY, struct.pack("<IQ", kind, len(value)) + value.tobytes()
    if isinstance(value, Sequence):
        return ARRAY, _sequence(value)
    scalar = _scalar(value)
    return TYPES[scalar.dtype.newbyteorder("<")], scalar.tobytes()


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    return np.uint32(value) if isinstance(value, int) else np.float32(value)


def _sequence(values: Sequence[Any]) -> bytes:
    """Return element type, length and elements of strings, or of arrays."""
    if is_strings(values):
        parts = [_string(each) for each in values]
        return struct.pack("<IQ", STRING, len(parts)) + b"".join(parts)
    arrays = [_value(each) for each in values]
    assert all(kind == ARRAY for kind, _ in arrays), "numbers are NumPy arrays"
    joined = b"".join(data for _, data in arrays)
    return struct.pack("<IQ", ARRAY, len(arrays)) + joined


def _string(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
