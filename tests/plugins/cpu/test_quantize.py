"""Quantization while loading, on the native kernels: numbers and the weight cache."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl import EngineConfig
from inl.cache_dir.packed_folder import SUFFIX
from inl.dtypes import widen
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.protocol.runner import Limits
from inl.runners.local_runner import start_runner
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import plain_logits, tiny_llama
from inl.weights.quantize.report import KINDS
from inl_cpu import weight_cache
from quantized_blocks import decoded

LIMITS = Limits(3, (9,), 16, 4, 256)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    config, tensors = tiny_llama(
        np.random.default_rng(3), hidden=64, heads=4, kv_heads=2, head_dim=16
    )
    (root / "config.json").write_text(json.dumps(config))
    save_file(tensors, root / "model.safetensors")
    return root


def logits(folder, kind, device, dtype):
    config = EngineConfig(backend=device, dtype=dtype, quantize=kind)
    backend = make_backend(device)
    runner = start_runner(open_model(folder), backend, config, limits=LIMITS)
    for thread in threading.enumerate():
        if thread.name == "inl-weight-cache":  # saves what was packed
            thread.join()
    return prompt_logits(runner, IDS)


def exact(folder, kind, decoded_as=None):
    """float64 logits of the weights as loaded."""
    language = open_model(folder)
    config = language.checkpoint.config
    if kind:
        language = language.quantized(kind)
    checkpoint = language.checkpoint
    if decoded_as:
        checkpoint = checkpoint.rounded(decoded_as)
    weights = {}
    for name in checkpoint.names():
        array = checkpoint.tensor(name)
        blocks = array.dtype in KINDS.values()
        weights[name] = decoded(array) if blocks else widen(array).astype(np.float64)
    return plain_logits(config, weights, IDS)[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_float32_equal_float64(folder, kind):
    want = exact(folder, kind)
    error = np.abs(logits(folder, kind, "cpu", "float32") - want).max()
    assert error < 1e-5 * np.abs(want).max()
    assert np.abs(exact(folder, None) - want).max() > 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_bfloat16_err_at_most_twice_as_much_as_the_reference(
    folder, kind, monkeypatch
):
    """In bfloat16, this device multiplies 8-bit floats as q8_0."""
    monkeypatch.setenv("INL_CPU_INPUTS", "int16")
    want = exact(folder, kind, "q8_0" if kind == "fp8" else None)
    ours, reference = (
        np.abs(logits(folder, kind, device, "bfloat16") - want).max()
        for device in ("cpu", "reference")
    )
    assert ours <= 2 * reference + 2.0**-7 * np.abs(want).max()


def test_a_cache_of_another_kind_is_never_used(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("INL_CACHE", str(tmp_path))
    monkeypatch.delenv(weight_cache.VARIABLE, raising=False)
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1)
    kinds = [None, *KINDS]
    first = [logits(folder, kind, "cpu", "float32") for kind in kinds]
    files = sorted((tmp_path / "packed").glob(f"*{SUFFIX}"))
    assert len(files) == len(kinds)
    inodes = [file.stat().st_ino for file in files]
    again = [logits(folder, kind, "cpu", "float32") for kind in kinds]
    assert sorted((tmp_path / "packed").glob(f"*{SUFFIX}")) == files
    assert [file.stat().st_ino for file in files] == inodes  # read, not written
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one, other)
    assert len({row.tobytes() for row in first}) == len(kinds)
