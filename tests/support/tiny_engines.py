"""Fixtures: engines on a tiny model, and device types without a backend."""

from __future__ import annotations

import numpy as np
import pytest

from byte_tokens import bytes_as_tokens
from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.plugin import registry
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

VOCAB = 256


@pytest.fixture
def without_backend(monkeypatch):
    """Function that hides the backend of a device type, if one is installed."""

    def hide(kind):
        monkeypatch.delitem(registry()._backends, kind, raising=False)

    return hide


@pytest.fixture(scope="session")
def tiny_made():
    """Config and tensors of a tiny Llama over bytes."""
    return tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2)


@pytest.fixture
def engines(tiny_made):
    """Makes engines on the tiny model, or on ``runner``, and closes them."""
    made = []

    def make(*, on_step=None, eos=(), runner=None, drafter=None, **settings):
        checkpoint = MemoryCheckpoint(*tiny_made)
        checkpoint.eos_token_ids = tuple(eos)
        settings = {"backend": "reference", "max_batch": 4, "context": 96} | settings
        engine = InferenceEngine(
            LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint),
            bytes_as_tokens(),
            EngineConfig(**settings),
            runner=runner,
            on_step=on_step,
            drafter=drafter,
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def drained():
    """Whether nothing of an engine's work is left, blocks and slots included."""

    def check(engine):
        for _ in range(8):
            if not engine.core.has_work:
                break
            engine.step()
        scheduler = engine.core.scheduler
        held = any(pool.used_blocks for pool in scheduler.kv_cache.pools)
        return not (engine.core.has_work or held or scheduler.running)

    return check
