"""A cache folder, a model file and weights to pack."""

from __future__ import annotations

import numpy as np
import pytest

from inl.dtypes import wrap
from inl_cpu import weight_cache
from packed_weights import COLUMNS, q4_0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, in which small weights are cached too."""
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(weight_cache.VARIABLE, raising=False)
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path):
    """A file in place of a model; its bytes determine the cache file's name."""
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(range(256)) * 8192)
    return file


@pytest.fixture
def sources(rng):
    plain = rng.standard_normal((40, COLUMNS)).astype(np.float32)
    return {
        "qkv": [q4_0(rng, 64), q4_0(rng, 16), q4_0(rng, 16)],
        "gate": [q4_0(rng, 48), q4_0(rng, 48)],
        "plain": [wrap(plain)],
    }
