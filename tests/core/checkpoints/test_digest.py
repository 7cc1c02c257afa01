"""The digest that identifies a model's config and weights."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import safetensors.numpy

from inl.checkpoints.digest import SAMPLES, model_digest
from inl.executor.model_loader import open_model
from inl.testing.tiny import MemoryCheckpoint, tiny_llama


@pytest.fixture
def saved(tmp_path):
    """Save a tiny Llama, with tensors or config changed; returns its digest."""

    def save(name, *, change=(), seed=0, **fields):
        path = tmp_path / name
        path.mkdir()
        config, tensors = tiny_llama(np.random.default_rng(seed), vocab=256)
        for tensor in change:
            tensors[tensor] = tensors[tensor] + np.float32(0.5)
        (path / "config.json").write_text(json.dumps(config | fields))
        safetensors.numpy.save_file(tensors, path / "model.safetensors")
        return model_digest(open_model(path).checkpoint)

    return save


def test_copies_have_the_same_digest(saved):
    assert saved("one") == saved("copy")


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"change": ["model.embed_tokens.weight"]},
        {"change": ["model.norm.weight"]},
        {"rms_norm_eps": 0.25},
    ],
    ids=lambda changed: str(next(iter(changed.values()))),
)
def test_other_weights_or_config_have_another_digest(saved, changed):
    assert saved("one") != saved("other", **changed)


def test_models_without_files_are_sampled_per_tensor():
    config, tensors = tiny_llama(np.random.default_rng(0))
    before = model_digest(MemoryCheckpoint(config, tensors))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert tensors[name].ndim == 2
    tensors = tensors | {name: tensors[name] + np.float32(1)}
    assert model_digest(MemoryCheckpoint(config, tensors)) != before


def test_the_digest_of_a_large_file_is_sampled(tmp_path, report, saved):
    """A file of 270 MB, as a model of 135M parameters, is not read whole."""
    saved("large")
    path = tmp_path / "large" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    checkpoint = open_model(path.parent).checkpoint
    with path.open("r+b") as file:
        file.truncate(270_000_000)
    began = time.perf_counter()
    before = model_digest(checkpoint)
    report(f"digest: {1e3 * (time.perf_counter() - began):.1f} ms of {len(tensors)}")
    with path.open("r+b") as file:
        file.seek(500 * (270_000_000 // SAMPLES))
        file.write(b"changed")
    assert model_digest(checkpoint) != before
