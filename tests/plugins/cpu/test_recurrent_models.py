"""Models with recurrent layers: answers of the native kernels, what computes them."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from depth import mostly_full
from inl import EngineConfig, InferenceEngine
from inl.executor.model_executor import SIZE_CLASSES
from inl.executor.model_loader import LanguageModel
from inl.runners.local_runner import start_runner
from plain_byte_tokens import plain_bytes_as_tokens
from random_families import random_family

NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "bamba", "falcon_h1")
LENGTHS = (41, 3, 60, 17, 1)


def language_of(name):
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_family(model, name, vocab_size=256)
    return LanguageModel(model, model.config(files.config), files)


def answers(name, backend, **settings):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in LENGTHS]
    config = EngineConfig(backend=backend, context=112, **settings)
    with InferenceEngine(language_of(name), plain_bytes_as_tokens(), config) as engine:
        return [found.token_ids for found in engine.generate(prompts, max_tokens=24)]


@pytest.mark.parametrize("name", mostly_full(NAMES))
def test_answers_equal_the_reference(name):
    """In batches and chunks, with slots that are used again."""
    want = answers(name, "reference", dtype="float64", max_batch=1)
    assert len({token for one in want for token in one}) > 20
    for settings in ({"token_budget": 16}, {"invariant": True}):
        found = answers(name, "cpu", dtype="float32", max_batch=2, **settings)
        assert found == want, settings


def numpy_ops(name, backend):
    """Ops of any step that NumPy computes."""
    options = EngineConfig(backend="cpu", dtype="float32", context=112)
    runner = start_runner(language_of(name), backend, options)
    return {
        op
        for bucket in SIZE_CLASSES
        for op, choices in runner.executor.tracer(bucket).choices.items()
        for choice in choices.values()
        if choice.winner.endswith("numpy")
    }


@pytest.mark.parametrize("name", NAMES)
def test_numpy_computes_no_layer(name, backend):
    assert numpy_ops(name, backend) == numpy_ops("llama", backend)
