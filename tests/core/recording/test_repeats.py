"""Traces of repeated steps replay like others, also on a runner without loops."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.engine.core import EngineCore
from inl.models.llama import MODEL
from inl.protocol.runner import Reply
from inl.recording.recorder import Recorder
from inl.recording.replay import replay
from inl.recording.trace_file import RunHeader, read_trace
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama

FILES = MemoryCheckpoint(*tiny_llama(np.random.default_rng(3)))
LIMITS = Limits(5, (60,), 4, 16, 96, decode_steps=6)


def make(loops, limits=LIMITS):
    backend = ReferenceBackend(Device("reference:0"))
    runner = local_runner(backend, MODEL, FILES, limits)
    if not loops:
        runner.executor.loops = None
    return runner


@pytest.fixture(params=[True, False], ids=["loop", "one by one"])
def items(request, tmp_path):
    runner, path = make(request.param), tmp_path / "trace"
    recorder = Recorder(lambda: RunHeader(runner.limits, "reference:0"), path)
    config = SchedulerConfig(
        decode_steps=6, repeat_seconds=float("inf"), eos_ids=frozenset(range(5))
    )
    core = EngineCore(runner, config, recorder=recorder)
    for at in range(4):
        core.add(Request([at, 7], max_tokens=25, temperature=0.9, seed=at))
    while core.has_work:
        assert not any(event.error for event in core.step())
    recorder.close()
    return read_trace(path)


@pytest.mark.parametrize("loops", [True, False], ids=["loop", "one by one"])
def test_every_token_is_computed_again(items, loops):
    outcome = replay(items, lambda limits: make(loops, limits))
    assert outcome.rows > 4
    assert not outcome.skipped
    assert not outcome.differences


def test_a_changed_token_is_found(items):
    reply = next(
        item for item in items if isinstance(item, Reply) and item.tokens.shape[1] == 6
    )
    at = next(index for index, item in enumerate(items) if item is reply)
    prompts = next(item for item in items if isinstance(item, Reply))
    # The row of a sequence that its first token has not ended.
    row = int(np.argmax(prompts.tokens[:4, 0] >= 5))
    tokens = reply.tokens.copy()
    tokens[row, 0] += 1
    items[at] = reply._replace(tokens=tokens)
    outcome = replay(items, lambda limits: make(True, limits))
    found = [(each.step, each.row) for each in outcome.differences]
    assert found == [(reply.step, row)]
