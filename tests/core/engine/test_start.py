"""Requests of the background thread: what listeners see, and what cancelling frees."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from held_runner import HeldRunner
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.errors import QueueFull, RequestError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.protocol.runner import Limits
from inl.testing.hash_runner import HashRunner
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from waiting import until

LIMITS = Limits(
    slots=5, blocks=(65,), block_size=16, max_blocks_per_seq=16, vocab=64, depth=3
)


def engine_on(runner):
    checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=64))
    model = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    config = EngineConfig(max_batch=4, max_queued_requests=4)
    return InferenceEngine(model, config=config, runner=runner)


@pytest.fixture
def engine():
    with engine_on(HashRunner(LIMITS)) as engine:
        yield engine


@pytest.fixture
def held_engine():
    with engine_on(HeldRunner(LIMITS)) as engine:
        yield engine


def used(engine):
    return sum(pool.used_blocks for pool in engine.core.scheduler.kv_cache.pools)


def test_a_started_request_calls_its_listener_until_it_has_finished(engine):
    woken = threading.Event()
    handle = engine.start([1, 2], listener=woken.set, max_tokens=5)
    while not handle.completed:
        assert woken.wait(300)
        woken.clear()
    assert (
        handle.completion().token_ids == engine.generate([1, 2], max_tokens=5).token_ids
    )


def test_a_cancelled_request_frees_its_blocks_without_another_one(held_engine):
    gate = held_engine.runner.gate
    for steps in range(1, 31):
        gate.hold_after(steps)
        handle = held_engine.start([1, 2, 3], listener=lambda: None, max_tokens=90)
        assert gate.is_held.wait(300)
        assert used(held_engine)
        held_engine.cancel(handle)
        gate.release()
        until(lambda: not used(held_engine))
        assert handle.finish_reason == "cancelled"


def test_a_request_that_cannot_be_served_is_refused_at_once(engine):
    with pytest.raises(RequestError):
        engine.start([1], listener=lambda: None, temperature=-1)
    for _ in range(4):
        engine.submit([1])
    with pytest.raises(QueueFull):
        engine.start([1], listener=lambda: None)
