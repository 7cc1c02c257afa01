"""Ranks on the native library, in processes: the answers of a whole model."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import mixture_answers
from depth import mostly_full
from inl import EngineConfig
from inl.backend.collectives import AXES, Ranks
from inl.engine.core import EngineCore
from inl.errors import WorkerLost
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.runners.startup import start
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.speculation.drafters import NgramDrafter
from inl.speculation.planner import Speculation
from inl.testing.tiny import plain_logits, tiny_llama
from inl_cpu.library import open_machine
from served_requests import served
from toy_guide import ToyGrammar

PROMPTS = [[5, 17, 80, 3, 44, 9], [61], [7, 7, 12, 90, 33] * 7]
COUNT = 24


@pytest.fixture(scope="module")
def made():
    return tiny_llama(np.random.default_rng(21), layers=3, kv_heads=4, bias=True)


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
            backend="cpu", placement=placement, context=128, worker_seconds=600,
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


def answers(core, grammar=None, **options):
    """Requests that a core has served, with a grammar if there is one."""
    return served(core, PROMPTS, COUNT, grammar, **options)


PLACEMENTS = mostly_full(
    ["pipeline=2,tensor=2", "tensor=2", "tensor=4", "pipeline=2", "pipeline=3"]
    + ["data=2", "data=2,tensor=2"]
)
SAMPLED = {"temperature": 1.3, "seed": 7}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_answer_as_the_whole_model(begin, made, placement):
    one, ranks = begin(None), begin(placement)
    for request in answers(ranks):
        exact = plain_logits(*made, request.tokens[:-1])[-COUNT:]
        assert request.output_ids == list(exact.argmax(-1))
    grammar = ToyGrammar(3, 96, {95}, counts=(2, 9))
    for options in (SAMPLED, {"grammar": grammar}, {"grammar": grammar, **SAMPLED}):
        expected, found = (
            [request.output_ids for request in answers(core, **options)]
            for core in (one, ranks)
        )
        assert found == expected
        assert len({*map(tuple, found)}) > 1


@pytest.mark.parametrize(
    "placement",
    mostly_full(
        ["data=2", "expert=2", "tensor=2,expert=2", "pipeline=2,expert=2", "expert=4"]
        + ["data=2,tensor=2", "data=2,expert=2"],
        quick=2,
    ),
)
def test_ranks_own_experts(tmp_path, monkeypatch, placement):
    monkeypatch.setenv("INL_THREADS", "1")
    config, tensors = mixture_answers.made()
    folder = mixture_answers.write(tmp_path / "model", config, tensors)
    options = dict(mixture_answers.OPTIONS) | {"expert_load_interval": 1}
    if "pipeline" in placement:
        changed = {"max_adapters": None, "depth": 3, "expert_load_interval": None}
        options |= changed
    language, found = open_model(folder), []
    for division in (None, placement):
        given = EngineConfig(
            backend="cpu", placement=division, dtype="float32", worker_seconds=600,
            **options,
        )  # fmt: skip
        with closing(start(language, given).runner) as runner:
            has_room = language if runner.limits.adapters else None
            found.append(mixture_answers.answers(runner, has_room))
            requests, _ = mixture_answers.served(runner)
            check_loads(runner, bool(options["expert_load_interval"]))
        for request in requests:
            exact = mixture_answers.exact(config, tensors, request)
            assert request.output_ids == exact
    assert found[0] == found[1]


@pytest.mark.parametrize("placement", mostly_full(["expert=2", "data=2"]))
def test_ranks_with_copies_of_experts(tmp_path, monkeypatch, placement):
    monkeypatch.setenv("INL_THREADS", "1")
    config, tensors = mixture_answers.made()
    folder, loads = tmp_path / "model", tmp_path / "loads.json"
    language = open_model(mixture_answers.write(folder, config, tensors))
    loads.write_text(json.dumps({"counts": [[90, 5, 5, 5, 5, 5, 5, 5]] * 2}))
    given = EngineConfig(
        backend="cpu", placement=placement, dtype="float32", worker_seconds=600,
        expert_copies=f"2:{loads}", expert_load_interval=1,
        **mixture_answers.OPTIONS | {"max_adapters": None},
    )  # fmt: skip
    with closing(start(language, given).runner) as runner:
        requests, _ = mixture_answers.served(runner)
        check_loads(runner, True)
    for request in requests:
        assert request.output_ids == mixture_answers.exact(config, tensors, request)


def check_loads(runner, is_counted):
    """Two experts are counted for each token but the last one sampled."""
    core = EngineCore(runner)
    requests = served(core, PROMPTS, COUNT)
    tokens = sum(len(request.tokens) - 1 for request in requests)
    counts = core.expert_loads.counts
    assert counts.shape == ((2, 8) if is_counted else (0, 0))
    assert counts[:-1].sum() == (2 * tokens if is_counted else 0)


def test_drafts_are_verified_by_all_stages(begin, made):
    core = begin("pipeline=2", max_drafts=3, speculation="ngram")
    limits = core.runner.limits
    assert (limits.stages, limits.depth) == (2, 3)
    scheduler = Scheduler(limits, speculation=Speculation(NgramDrafter(), 3))
    ids = [7, 7, 12] * 9
    request = Request(ids, max_tokens=COUNT)
    core = EngineCore(core.runner, scheduler=scheduler)
    core.add(request)
    while core.has_work:
        core.step()
    exact = plain_logits(*made, request.tokens[:-1])[-COUNT:]
    assert request.output_ids == list(exact.argmax(-1))
    assert scheduler.speculation.drafted > 0


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


KILLED = signal.SIGKILL, "was killed by SIGKILL"
STOPPED = signal.SIGSTOP, "was stopped by a signal"


@pytest.mark.parametrize(
    "case",
    mostly_full([
        ("pipeline=3", 0, *STOPPED), ("tensor=2", 0, *KILLED),
        ("tensor=2", 1, *STOPPED), ("tensor=2", 1, *KILLED),
        ("tensor=2", 0, *STOPPED), ("pipeline=3", 0, *KILLED),
        ("pipeline=3", 1, *KILLED), ("pipeline=3", 1, *STOPPED),
        ("pipeline=3", 2, *KILLED), ("pipeline=3", 2, *STOPPED),
        ("data=2", 0, *KILLED), ("data=2", 1, *KILLED), ("data=2", 1, *STOPPED),
    ], quick=3),
    ids=str,
)  # fmt: skip
def test_a_group_starts_again_in_mid_stream(begin, made, case):
    placement, rank, number, how = case
    if number == signal.SIGSTOP and not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    core = begin(placement, on_worker_loss="restart")
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
    assert f"rank {rank} of {len(pids)} failed" in str(loss)
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
