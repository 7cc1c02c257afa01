"""Repeated steps as one XLA program give the tokens of single steps."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.engine.core import EngineCore
from inl.models.llama import MODEL
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama

VOCAB, STEPS = 96, 6
# The longest needs the program that the others use too: each takes seconds to compile.
REQUESTS = [
    {"temperature": 0.0, "max_tokens": 16},
    {"temperature": 0.8, "max_tokens": 25, "seed": 1},
    {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True},
    {"temperature": 0.8, "max_tokens": 40, "seed": 2, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def files():
    tiny = tiny_llama(np.random.default_rng(11), vocab=VOCAB, layers=1)
    return MemoryCheckpoint(*tiny)


def answers(backend, files, steps, blocks, cancel=None):
    """Serve all requests; returns their outputs, and how often steps were repeated."""
    limits = Limits(
        4, (blocks,), 4, 16, VOCAB, sampler="sample", token_budget=16,
        decode_steps=steps,
    )  # fmt: skip
    runner, repeats = local_runner(backend, MODEL, files, limits), []
    config = SchedulerConfig(
        decode_steps=steps,
        repeat_seconds=float("inf"),
        eos_ids=frozenset(range(50, 54)),
    )
    core = EngineCore(runner, config, on_step=lambda r: repeats.append(r.bucket.repeat))
    requests = [
        Request([at, 3, 4, 9], **options) for at, options in enumerate(REQUESTS)
    ]
    for request in requests:
        core.add(request)
    rounds = 0
    while core.has_work:
        assert [event.error for event in core.step() if event.error] == []
        rounds += 1
        if rounds == cancel:
            core.cancel(requests[3].id)
    (pool,) = core.scheduler.kv_cache.pools
    assert pool.used_blocks == 0
    found = [(each.output_ids, each.finish_reason) for each in requests]
    return found, repeats, core.scheduler.preemptions


def test_tokens_are_those_of_single_steps(tpu_backend, files):
    reference = ReferenceBackend(Device("reference:0"), dtype="float64")
    plain, repeats, _ = answers(reference, files, 1, 40)
    assert set(repeats) == {1}
    assert [reason for _, reason in plain] == ["length", "stop", "length", "length"]
    # With a preemption and a cancellation.
    found, repeats, preemptions = answers(tpu_backend, files, STEPS, 15, cancel=11)
    assert preemptions
    assert repeats.count(STEPS) > 2
    assert found[:3] == plain[:3]
    ids, reason = found[3]
    assert reason == "cancelled"
    assert plain[3][0][: len(ids)] == ids
