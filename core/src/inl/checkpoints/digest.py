"""Digest of a model: identifies its config and weights without reading all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.checkpoints.files.tensor_file import open_regular

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint

SAMPLE_BYTES = 256
SAMPLES = 1024
"""Samples per file, which take 2 ms to read from the page cache: one in every 256 KiB
of a model of 135M parameters in 16 bits, so at least one in each of its matrices."""


def model_digest(checkpoint: Checkpoint) -> str:
    """Return a sha256 in hex that differs between models.

    It covers the config, the tensors' names, dtypes and shapes, the bytes of all
    vectors (the norms), and the size and evenly spaced samples of every file. Paths and
    times are left out, so copies of a model have the same digest. Models without files
    are sampled per tensor.
    """
    digest = sha256(repr(_sorted(checkpoint.config)).encode())
    files = checkpoint.files()
    for name in sorted(checkpoint.names()):
        dtype, shape = checkpoint.spec(name)
        digest.update(f"{name} {dtype} {shape}\n".encode())
        if len(shape) == 1 or not files:
            data = checkpoint.tensor(name).data
            digest.update(data.tobytes() if len(shape) == 1 else _ends(data))
    for path in files:
        for part in _samples(path):
            digest.update(part)
    return digest.hexdigest()


def _ends(data: Any) -> bytes:
    flat = data.reshape(-1)
    return bytes(flat[:SAMPLE_BYTES].tobytes() + flat[-SAMPLE_BYTES:].tobytes())


def _samples(path: Path) -> Iterator[bytes]:
    """Yield a file's size, then evenly spaced pieces of its content."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        yield f"file {size}\n".encode()
        for start in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
            file.seek(start)
            yield file.read(SAMPLE_BYTES)
        file.seek(max(size - SAMPLE_BYTES, 0))
        yield file.read(SAMPLE_BYTES)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return value
