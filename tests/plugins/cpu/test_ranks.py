"""Ranks on the native library, in processes: the answers of a whole model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl import EngineConfig
from inl.backend.collectives import AXES, Ranks
from inl.engine.core import EngineCore
from inl.errors import WorkerLost
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.runners.startup import start
from inl.scheduling.request import Request
from inl.testing.tiny import plain_logits, tiny_llama
from inl_cpu.library import open_machine

PROMPTS = [[5, 17, 80, 3, 44, 9], [61], [7, 7, 12, 90, 33] * 7]
COUNT = 24


@pytest.fixture(scope="module")
def made():
    return tiny_llama(np.random.default_rng(21), kv_heads=4, bias=True)


@pytest.fixture
def begin(made, tmp_path, monkeypatch):
    """Start an engine core over ranks of the native library."""
    monkeypatch.setenv("INL_THREADS", "1")
    config, tensors = made
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    started = []

    def make(placement, **options):
        config = EngineConfig(
            backend="cpu", placement=placement, context=128, worker_seconds=60,
            max_batch=3, token_budget=16, **{"dtype": "float32", **options},
        )  # fmt: skip

        def fresh(error=None):
            losses.extend([error] if error else [])
            started.append(start(open_model(tmp_path), config).runner)
            return started[-1]

        restarts = options.get("on_worker_loss") == "restart"
        return EngineCore(fresh(), replace=fresh if restarts else None)

    make.losses = losses = []
    yield make
    for runner in started:
        runner.close()


def answers(core, **options):
    requests = [Request(ids, max_tokens=COUNT, **options) for ids in PROMPTS]
    for request in requests:
        core.add(request)
    while core.has_work:
        assert not [event.error for event in core.step() if event.error]
    return requests


@pytest.mark.parametrize("placement", ["tensor=2", "tensor=4"])
def test_ranks_answer_as_the_whole_model(begin, made, placement):
    for request in answers(begin(placement)):
        exact = plain_logits(*made, request.tokens[:-1])[-COUNT:]
        assert request.output_ids == list(exact.argmax(-1))


def test_sampled_answers_are_those_of_one_rank(begin):
    sampled = {"temperature": 1.3, "seed": 7}
    texts = [
        [request.output_ids for request in answers(begin(placement), **sampled)]
        for placement in (None, "tensor=2")
    ]
    assert texts[0] == texts[1]
    assert len({*map(tuple, texts[0])}) == len(PROMPTS)


def test_a_killed_rank_ends_the_group_and_is_named(begin):
    core = begin("tensor=2")
    core.add(Request(PROMPTS[0], max_tokens=100))
    core.step()
    os.kill(core.runner.runners[1].pid, signal.SIGKILL)
    errors = []
    while core.has_work:
        errors += [event.error for event in core.step() if event.error]
    (error,) = errors
    assert type(error) is WorkerLost
    assert "rank 1 of 2 failed" in str(error)


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(
            signal.SIGSTOP,
            "was stopped by a signal",
            marks=pytest.mark.skipif(
                not Path("/proc/self/stat").exists(), reason="needs /proc"
            ),
        ),
    ],
    ids=["killed", "stopped"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_starts_again_in_mid_stream(begin, made, rank, number, how):
    core = begin("tensor=2", on_worker_loss="restart")
    pids = [each.pid for each in core.runner.runners]
    requests = [Request(ids, max_tokens=COUNT) for ids in PROMPTS]
    for request in requests:
        core.add(request)
    while core.has_work:
        assert not [event.error for event in core.step() if event.error]
        if core.restarts == 0 and len(requests[0].output_ids) == 5:
            os.kill(pids[rank], number)
    assert core.restarts == 1
    (loss,) = begin.losses
    assert type(loss) is WorkerLost
    assert f"rank {rank} of 2 failed" in str(loss)
    assert f"(process {pids[rank]}): {how}" in str(loss)
    for request in requests:
        exact = plain_logits(*made, request.tokens[:-1])[-COUNT:]
        assert request.output_ids == list(exact.argmax(-1))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_of_a_host_share_its_cores(monkeypatch):
    monkeypatch.setenv("INL_THREADS", "")
    monkeypatch.setattr("inl_cpu.library.count_threads", lambda: 5)
    assert [open_machine(each).threads for each in (1, 2, 9)] == [5, 2, 1]
    monkeypatch.setenv("INL_THREADS", "3")
    assert open_machine(2).threads == 3


def test_ranks_are_offered_along_each_axis():
    assert make_backend("cpu").offers(Ranks).axes == AXES
