"""Models of random weights that every process makes for itself: files of their config.

A plugin of the checkpoint format ``.random``, loaded by ``INL_PLUGINS``. The values of
a tensor are a window of one array of random numbers for each inner size, so that a
model of 140 GB is opened at once and read as fast as memory.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray
from inl.errors import TokenizerNotFound
from inl.models.registry import find_model
from inl.plugin import hookimpl
from inl.spec.tree import leaves
from inl.weights.sources import stored_tensors

PERIOD = 4194301
"""Numbers before they repeat: a prime, so that no two rows of a matrix are equal."""


@hookimpl
def inl_register_formats(register: Any) -> None:
    register(".random", "random_format:RandomWeights")


class RandomWeights(Checkpoint):
    """Tensors in bfloat16 of the model whose config a file holds."""

    eos_token_ids = ()
    chat_template = None

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, json.loads(path.read_text())
        model = find_model(self.config, path)
        self._shapes: dict[str, tuple[int, ...]] = {
            name: tuple(shape)
            for group in leaves(model.weights(model.config(self.config)))
            for param in group.params.values()
            for name, shape in stored_tensors(param).items()
        }
        self._largest: dict[int, int] = {}
        for shape in self._shapes.values():
            key, count = _inner(shape), math.prod(shape)
            self._largest[key] = max(count, self._largest.get(key, 0))
        self._arrays: dict[int, Any] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return list(self._shapes)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self._shapes:
            raise self.missing(name)
        return "bfloat16", self._shapes[name]

    def tensor(self, name: str) -> HostArray:
        _, shape = self.spec(name)
        numbers, start = self._numbers(_inner(shape)), crc32(name.encode()) % PERIOD
        data = numbers[start : start + math.prod(shape)].reshape(shape)
        return HostArray(data, "bfloat16", shape)

    def tokenizer(self) -> Any:
        raise TokenizerNotFound("random weights have none")

    def close(self) -> None:
        self._arrays = {}

    def _numbers(self, inner: int) -> Any:
        """Return the bits of numbers with the scale of matrices of this inner size."""
        with self._lock:
            if inner not in self._arrays:
                drawn = np.random.default_rng(0).standard_normal(PERIOD, np.float32)
                drawn = 1.0 + 0.1 * drawn if not inner else drawn * 1.4 / inner**0.5
                bits = (drawn.view(np.uint32) >> 16).astype(np.uint16)
                made = np.resize(bits, self._largest[inner] + PERIOD)
                made.setflags(write=False)
                self._arrays[inner] = made
            return self._arrays[inner]


def _inner(shape: tuple[int, ...]) -> int:
    """Return the number of terms of a matrix's sums; 0 for a vector."""
    return shape[-1] if len(shape) > 1 else 0


def register_format() -> None:
    """Let this process and its children open the format."""
    here = str(Path(__file__).parent)
    for name, value, separator in (
        ("INL_PLUGINS", "random_format", ","), ("PYTHONPATH", here, os.pathsep)
    ):  # fmt: skip
        given = os.environ.get(name, "")
        if value not in given.split(separator):
            os.environ[name] = separator.join(filter(None, (given, value)))
    if here not in sys.path:
        sys.path.append(here)
