"""Writer of safetensors files, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import BinaryIO, Final

import numpy as np

from inl.checkpoints.files.safetensors import DTYPES
from inl.checkpoints.files.tensor_file import plain_bytes
from inl.dtypes import HostArray

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT: Final = 8
"""The data of a file begins at a multiple of this."""


class SafetensorsWriter:
    """Writes tensors of a file in the order of ``specs``: (dtype, shape) by name."""

    def __init__(
        self, file: BinaryIO, specs: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        self._file, self._specs, self._left = file, specs, list(specs)
        text, _ = header(specs)
        file.write(text)

    def write(self, name: str, array: HostArray) -> None:
        """Append the next tensor, which is ``name``."""
        assert name == self._left.pop(0), "tensors are written in the order of specs"
        assert (array.dtype, array.shape) == self._specs[name], "as announced"
        self._file.write(np.ascontiguousarray(array.data).data.cast("B"))


def header(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    """Return the bytes before the data, and the size of the whole file."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in specs.items():
        stop = at + plain_bytes(shape, dtype)
        fields[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at
