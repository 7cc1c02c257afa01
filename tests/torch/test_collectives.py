"""Ranks as processes with gloo on the CPU, against float64 and a single rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import mixture_answers
from depth import mostly_long
from free_ports import unused_address
from inl import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.embedder import PooledRequest
from inl.errors import (
    DeviceError,
    OutOfMemory,
    RequestError,
    WeightMismatch,
    WorkerLost,
)
from inl.executor.model_loader import open_model
from inl.runners import rank_startup as rank_start
from inl.runners.rank_startup import rank_devices
from inl.runners.startup import start
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.testing.tiny import plain_logits, tiny_llama

PROMPTS = [[5, 17, 80, 3, 44, 9], [61], [7, 7, 12, 90, 33] * 7]
COUNT = 24
TORCH = {"INL_CPU": "torch", "INL_THREADS": "1"}


@pytest.fixture(scope="module")
def made():
    return tiny_llama(np.random.default_rng(21), kv_heads=4, bias=True)


@pytest.fixture(scope="module")
def language(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config, tensors = made
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return open_model(folder)


@pytest.fixture
def begin(language, monkeypatch, tmp_path):
    """Start an engine core over ranks; all processes must have ended afterwards."""
    monkeypatch.setenv("INL_CPU", "torch")
    monkeypatch.setenv("INL_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = []

    def make(ranks, *, restart=False, language=language, **options):
        config = EngineConfig(
            tensor_parallel=ranks, worker_seconds=600,
            **{
                "context": 128, "backend": "cpu", "dtype": "float32", "max_batch": 3,
                "token_budget": 16, **options,
            },
        )  # fmt: skip

        def again(_error=None):
            started.append(start(language, config).runner)
            return started[-1]

        return EngineCore(
            again(),
            SchedulerConfig(token_budget=16),
            replace=again if restart else None,
        )

    yield make
    for runner in started:
        runner.close()
        processes = [rank._process for rank in getattr(runner, "_runners", ())]
        assert not any(process.alive for process in processes)


def answer(core, prompts=PROMPTS, count=COUNT, **options):
    requests = [Request(ids, max_tokens=count, **options) for ids in prompts]
    for request in requests:
        core.add(request)
    errors = []
    while core.has_work:
        errors += [event.error for event in core.step() if event.error]
    return requests, errors


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_logits_of_a_whole_model(begin, made, ranks):
    requests, errors = answer(begin(ranks), logprobs=20)
    assert not errors
    for request in requests:
        ids = request.tokens
        exact = log_softmax(plain_logits(*made, ids[:-1])[-COUNT:])
        assert request.output_ids == list(exact.argmax(-1))
        assert len(request.token_logprobs) == COUNT
        for row, found in zip(exact, request.token_logprobs, strict=True):
            told = [(row[token], value) for token, value in found.top]
            assert max(abs(want - got) for want, got in told) < 2e-5


@pytest.mark.full
@pytest.mark.parametrize(
    "placement", mostly_long(["tensor=2,expert=2", "data=2", "expert=2"], 2)
)
def test_ranks_own_experts(begin, tmp_path, placement):
    config, tensors = mixture_answers.made()
    folder = mixture_answers.write(tmp_path / "model", config, tensors)
    language, found = open_model(folder), []
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"counts": [[90, 5, 5, 5, 5, 5, 5, 5]] * 2}))
    for division, copies in ((None, None), (placement, None), (placement, 2)):
        options = {**mixture_answers.OPTIONS, "placement": division}
        options |= {"expert_load_interval": 3}
        if copies:
            options |= {"max_adapters": None, "expert_copies": f"{copies}:{loads}"}
        runner = begin(1, language=language, **options).runner
        if copies:
            alone = mixture_answers.answers(runner)
            assert alone == {kind: found[0][kind] for kind in alone}
            continue
        found.append(mixture_answers.answers(runner, language))
        requests, _ = mixture_answers.served(runner)
        for request in requests:
            exact = mixture_answers.exact(config, tensors, request)
            assert request.output_ids == exact
    assert found[0] == found[1]


def test_ranks_that_divide_neither_vocabulary_nor_key_value_heads(begin, tmp_path):
    config, tensors = tiny_llama(np.random.default_rng(3), vocab=97, kv_heads=2)
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    core = begin(4, language=open_model(folder))
    bias = {96: 30.0}
    for options in ({}, {"logit_bias": bias, "repetition_penalty": 1.2}):
        requests, errors = answer(core, PROMPTS[:2], 8, logprobs=20, **options)
        assert not errors
        for request in requests:
            ids = request.tokens
            exact = log_softmax(plain_logits(config, tensors, ids[:-1])[-8:])
            if not options:
                assert request.output_ids == list(exact.argmax(-1))
            for row, found in zip(exact, request.token_logprobs, strict=True):
                for token, value in found.top:
                    assert abs(row[token] - value) < 2e-5
    assert 96 in requests[0].output_ids


def test_ranks_give_the_hidden_states_of_a_whole_model(begin, made):
    core = begin(2)
    requests = [PooledRequest(ids) for ids in PROMPTS]
    for request in requests:
        core.add(request)
    while core.has_work:
        assert not [event.error for event in core.step() if event.error]
    head = np.asarray(made[1]["lm_head.weight"], np.float64)
    for request in requests:
        exact = plain_logits(*made, list(request.prompt))[-1]
        assert np.abs(head @ request.hidden - exact).max() < 2e-5


def test_two_ranks_in_bfloat16_stay_as_close_as_one(begin, made):
    apart = {}
    for ranks in (1, 2):
        requests, errors = answer(begin(ranks, dtype="bfloat16"), logprobs=20)
        assert not errors
        worst = []
        for request in requests:
            exact = log_softmax(plain_logits(*made, request.tokens[:-1])[-COUNT:])
            for row, found in zip(exact, request.token_logprobs, strict=True):
                worst += [abs(row[token] - value) for token, value in found.top]
        apart[ranks] = np.sqrt(np.mean(np.square(worst)))
    assert 0 < apart[2] < 1.5 * apart[1], apart


def test_ranks_that_were_started_by_hand(begin, made, monkeypatch):
    """Two workers join at one address; each takes a seat."""
    monkeypatch.setenv("INL_WORKER_SECRET", "5a" * 32)
    address = unused_address()
    words = [sys.executable, "-m", "inl", "worker", address]
    workers = [subprocess.Popen(words, stderr=-1) for _ in range(2)]
    try:
        core = begin(2, backend=f"join:{address}/cpu:0")
        requests, errors = answer(core, PROMPTS[:1])
        assert not errors
        exact = plain_logits(*made, requests[0].tokens[:-1])[-COUNT:]
        assert requests[0].output_ids == list(exact.argmax(-1))
        assert {each.pid for each in core.runner.runners} == {w.pid for w in workers}
        core.runner.close()
        said = sorted(
            each.communicate(timeout=300)[1].split(b"\n")[0] for each in workers
        )
        assert said == [f"inl: worker {at} of {address}".encode() for at in range(2)]
        assert [each.returncode for each in workers] == [0, 0]
    finally:
        for each in workers:
            each.kill()
            each.communicate()


def test_ranks_without_memory_for_a_step_serve_the_next(begin, made, monkeypatch):
    monkeypatch.setattr(rank_start, "FACTORY", "rank_factories:full")
    paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    core = begin(2)
    # Six tokens and one, then the rest of a long prompt in the same step.
    _, errors = answer(core)
    assert {type(error) for error in errors} == {OutOfMemory}
    words = r"rank 0 of 2: worker .*2\.00 GiB more does not fit, \d+ bytes are free"
    assert re.search(words, str(errors[0]))
    requests, errors = answer(core, PROMPTS[:2])
    assert not errors
    for request in requests:
        exact = plain_logits(*made, request.tokens[:-1])[-COUNT:]
        assert request.output_ids == list(exact.argmax(-1))


def test_a_killed_rank_ends_the_group_and_is_named(begin):
    core = begin(2)
    core.add(Request(PROMPTS[0], max_tokens=100))
    core.step()
    os.kill(core.runner.runners[1].pid, signal.SIGKILL)
    errors = []
    while core.has_work:
        errors += [event.error for event in core.step() if event.error]
    (error,) = errors
    assert type(error) is WorkerLost
    assert "rank 1 of 2 failed" in str(error)
    assert "SIGKILL" in str(error)


def test_a_lost_group_is_restarted_and_requests_continue(begin):
    whole, _ = answer(begin(1), PROMPTS[:1])
    core = begin(2, restart=True)
    request = Request(PROMPTS[0], max_tokens=COUNT)
    core.add(request)
    for _ in range(5):
        core.step()
    os.kill(core.runner.runners[0].pid, signal.SIGKILL)
    while core.has_work:
        assert not any(event.error for event in core.step())
    assert core.restarts == 1
    assert request.output_ids == whole[0].output_ids


def test_errors_of_ranks_are_raised_and_no_process_is_left(begin, tmp_path):
    with pytest.raises(RequestError, match="float16"):
        begin(2, dtype="float16")
    assert not list(tmp_path.iterdir())


def test_indivisible_heads_are_refused_before_a_start(begin):
    with pytest.raises(WeightMismatch, match="a multiple of 3, the number of ranks"):
        begin(3)


def test_ranks_use_consecutive_devices():
    config = EngineConfig(backend="cpu", tensor_parallel=2)
    assert rank_devices(config)[1] == ["cpu:0", "cpu:0"]
    python = Path("/bin/sh")
    config = EngineConfig(backend=f"worker:{python}/cuda:1", tensor_parallel=3)
    assert rank_devices(config) == (str(python), ["cuda:1", "cuda:2", "cuda:3"])
    config = EngineConfig(backend=f"worker:{python}/auto", tensor_parallel=2)
    with pytest.raises(DeviceError, match="name the first device"):
        rank_devices(config)


@pytest.mark.full
def test_verbs_along_two_axes():
    """Four processes: every verb along pipeline and tensor, over gloo."""
    done = subprocess.run(
        [sys.executable, "-m", "inl", "check", "cpu", "--only", "ranks", "--full"],
        capture_output=True, text=True, timeout=300, env=os.environ | TORCH,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks  9 passed  0 failed" in done.stdout
