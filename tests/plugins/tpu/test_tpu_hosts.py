"""Meshes over several hosts: one engine, a worker on each, JAX's CPU platform."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from free_ports import unused_address
from inl import EngineConfig, InferenceEngine
from inl.backend.collectives import Rank
from inl.cli.traced_step import explain_step, open_backend
from inl.device import Device
from inl.engine.core import EngineCore
from inl.errors import BackendUnavailable, RequestError, WeightMismatch, WorkerLost
from inl.executor.model_loader import open_model
from inl.placement.placement import Placement, parse_placement
from inl.runners.startup import start
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.step import Bucket
from inl.speculation.drafters import NgramDrafter
from inl.speculation.planner import Speculation
from inl.testing.near_tie import compare
from inl.testing.tiny import plain_logits, tiny_llama
from inl_jax.mesh.distributed import devices_of_hosts
from lora_files import LoraFiles
from served_requests import served
from toy_guide import ToyGrammar
from waiting import is_running

ORACLE = json.loads(
    (Path(__file__).parents[2] / "data" / "smollm2-oracle.json").read_text("utf-8")
)["cases"]
PROMPTS = [[5, 17, 80, 3, 44, 9], [61], [7, 7, 12] * 5]
COUNT = 12
SAMPLED = {"temperature": 1.3, "seed": 7}


@pytest.fixture(scope="module")
def made():
    return tiny_llama(np.random.default_rng(21), layers=1, kv_heads=4, bias=True)


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config, tensors = made
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    LoraFiles(tensors, seed=1).write(folder / "adapter")
    return folder


@pytest.fixture
def begin(folder):
    """Start the runner of a placement, on virtual devices of each process."""
    started = []

    def make(placement, **options):
        config = EngineConfig(
            **{
                "backend": "tpu:0", "placement": placement, "dtype": "float32",
                "context": 64, "max_batch": 3, "token_budget": 16, **options,
            }
        )  # fmt: skip
        started.append(start(open_model(folder), config).runner)
        return started[-1]

    yield make
    for runner in started:
        runner.close()
        workers = getattr(runner, "runners", ())
        assert not any(worker.alive for worker in workers)


def have_devices(monkeypatch, count):
    """Each worker has so many devices."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={count}")


def answers(core, prompts=PROMPTS, grammar=None, **options):
    """Requests that a core has served, with a grammar if there is one."""
    return served(core, prompts, COUNT, grammar, **options)


def check_exact(made, requests):
    for request in requests:
        exact = plain_logits(*made, request.tokens[:-1])[-COUNT:]
        assert request.output_ids == list(exact.argmax(-1))


def test_two_hosts_answer_as_the_whole_model_until_one_is_killed(begin, made):
    runner = begin(
        "tensor=2,hosts=2", max_batch=1, token_budget=1, depth=1,
        sampling="greedy",
    )  # fmt: skip
    pids = [worker.pid for worker in runner.runners]
    assert len({os.getpid(), *pids}) == 3
    core = EngineCore(runner)
    check_exact(made, answers(core, [[5, 17]]))
    core.add(Request([5, 17], max_tokens=COUNT))
    core.step()
    os.kill(pids[1], signal.SIGKILL)
    errors = []
    while core.has_work:
        errors += [event.error for event in core.step() if event.error]
    (error,) = errors
    assert type(error) is WorkerLost
    assert "rank 1 of 2 failed" in str(error)
    assert f"(process {pids[1]}): was killed by SIGKILL" in str(error)
    runner.close()
    assert not any(map(is_running, pids))


def test_what_hosts_do_not_have_is_refused(begin):
    """Before a worker starts, by the names of the options."""
    assert parse_placement("tensor=4,hosts=2") == Placement(tensor=4, hosts=2)
    assert str(Placement(data=2, tensor=2, hosts=4)) == "data=2,tensor=2,hosts=4"
    for text, words in {
        "tensor=2,hosts=3": "found hosts=3 for 2 devices",
        "hosts=2": "found hosts=2 for 1 devices",
        "tensor=2,hosts=2,devices=tpu:0+tpu:1": "found names of devices",
        "tensor=2,hosts=x": "accepted: AXIS=SIZE",
    }.items():
        with pytest.raises(RequestError, match=words):
            parse_placement(text)
    with pytest.raises(BackendUnavailable, match="divided along data, tensor, expert"):
        begin("pipeline=2,hosts=2")
    with pytest.raises(WeightMismatch, match="accepted: a multiple of 3"):
        begin("tensor=3,hosts=3")
    with pytest.raises(BackendUnavailable, match="found hosts=2; accepted: none on"):
        begin("tensor=2,hosts=2", backend="cpu")


def test_a_host_has_the_number_of_its_worker():
    """As the platform numbers it: JAX takes this process for host 0."""
    one = Device("tpu:0"), "cpu", Placement(hosts=1)
    (device,) = devices_of_hosts(*one, Rank(0, 1))
    assert device.process_index == 0
    words = "rank 1 is host 0 of the cpus; .* --seat 0 here"
    with pytest.raises(BackendUnavailable, match=words):
        devices_of_hosts(*one, Rank(1, 2))
    few = Device("tpu:0"), "cpu", Placement(tensor=4, hosts=2), Rank(0, 2)
    words = "needs 2 devices of each host; JAX finds 1 of platform cpu .* at rank 0"
    with pytest.raises(BackendUnavailable, match=words):
        devices_of_hosts(*few)


def test_the_program_of_a_host_is_explained(folder):
    config = EngineConfig("tpu:0", placement="tensor=2,hosts=2", dtype="float32")
    step = explain_step(open_model(folder), open_backend(config), config, Bucket(1, 1))
    assert step.plan.unloaded.ranks == 2
    mesh = EngineConfig("tpu:0", placement="data=2,hosts=2")
    with pytest.raises(BackendUnavailable, match="mesh data=2 needs 2 devices"):
        open_backend(mesh)


@pytest.mark.long
@pytest.mark.parametrize(
    ("placement", "devices"),
    [("tensor=2,hosts=2", 1), ("tensor=4,hosts=4", 1), ("data=2,tensor=2,hosts=2", 2)],
)
def test_hosts_answer_as_one_process(
    begin, made, folder, monkeypatch, placement, devices
):
    """Greedy, sampled, with a grammar, drafts and an adapter."""
    have_devices(monkeypatch, devices)
    room = {"max_adapters": 1, "max_adapter_rank": 4, "max_drafts": 3,
            "speculation": "ngram"}  # fmt: skip
    one, hosts = begin(None, **room), begin(placement, **room)
    check_exact(made, answers(EngineCore(hosts)))
    grammar = ToyGrammar(3, 96, {95}, counts=(2, 9))
    for options in (SAMPLED, {"grammar": grammar}, {"grammar": grammar, **SAMPLED}):
        expected, found = (
            [request.output_ids for request in answers(EngineCore(runner), **options)]
            for runner in (one, hosts)
        )
        assert found == expected
        assert len({*map(tuple, found)}) > 1
    scheduler = Scheduler(hosts.limits, speculation=Speculation(NgramDrafter(), 3))
    core = EngineCore(hosts, scheduler=scheduler)
    check_exact(made, answers(core, [[7, 7, 12] * 9]))
    assert scheduler.speculation.drafted > 0
    check_exact_adapter(hosts, made, folder)


def check_exact_adapter(runner, made, folder):
    """Rows with an adapter and rows without it, in one batch."""
    language, config = open_model(folder), EngineConfig(max_adapters=1)
    with InferenceEngine(language, config=config, runner=runner) as engine:
        engine.load_adapter("one", folder / "adapter")
        handles = [
            engine.submit(PROMPTS[0], max_tokens=COUNT, adapter=name)
            for name in (None, "one")
        ]
        while not all(handle.completed for handle in handles):
            engine.step()
    found = [list(handle.completion().token_ids) for handle in handles]
    config, tensors = made
    merged = LoraFiles(tensors, seed=1).merged(tensors)
    for ids, weights in zip(found, (tensors, merged), strict=True):
        exact = plain_logits(config, weights, [*PROMPTS[0], *ids[:-1]])[-COUNT:]
        assert ids == list(exact.argmax(-1))
    assert found[0] != found[1]


@pytest.mark.long
def test_repeated_steps_are_those_of_one_device(begin, made):
    runner = begin("tensor=2,hosts=2", decode_steps=4)
    assert runner.limits.decode_steps == 4
    check_exact(made, answers(EngineCore(runner)))


@pytest.mark.long
def test_workers_that_were_started_by_hand(begin, made, monkeypatch):
    """One of them with a wrong secret, which is refused."""
    monkeypatch.setenv("INL_WORKER_SECRET", "5a" * 32)
    address = unused_address()

    def join(seat, secret="5a" * 32):
        return subprocess.Popen(
            [sys.executable, "-m", "inl", "worker", address, "--seat", str(seat)],
            env={**os.environ, "INL_WORKER_SECRET": secret}, stderr=-1, text=True,
        )  # fmt: skip

    wrong, *workers = join(0, "00" * 32), join(1), join(0)
    try:
        runner = begin("tensor=2,hosts=2", backend=f"join:{address}/tpu:0")
        assert [each.pid for each in runner.runners] == [w.pid for w in workers[::-1]]
        check_exact(made, answers(EngineCore(runner)))
        runner.close()
        assert "refused this worker" in wrong.communicate(timeout=300)[1]
        said = [each.communicate(timeout=300)[1] for each in workers]
        assert [each.returncode for each in workers] == [0, 0], said
    finally:
        for each in (wrong, *workers):
            each.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "number", "how"),
    [
        (1, signal.SIGKILL, "was killed by SIGKILL"),
        (0, signal.SIGKILL, "was killed by SIGKILL"),
        (1, signal.SIGSTOP, "was stopped by a signal"),
    ],
)
def test_hosts_start_again_in_mid_stream(begin, made, rank, number, how):
    losses = []

    def fresh(error=None):
        losses.extend([error] if error else [])
        return begin("tensor=2,hosts=2", on_worker_loss="restart")

    core = EngineCore(fresh(), replace=fresh)
    pids = [each.pid for each in core.runner.runners]
    requests = [Request(ids, max_tokens=COUNT) for ids in PROMPTS]
    for request in requests:
        core.add(request)
    while core.has_work:
        assert not [event.error for event in core.step() if event.error]
        if core.restarts == 0 and len(requests[0].output_ids) == 5:
            os.kill(pids[rank], number)
    assert core.restarts == 1
    (loss,) = losses
    assert type(loss) is WorkerLost
    assert f"rank {rank} of 2 failed" in str(loss)
    assert f"(process {pids[rank]}): {how}" in str(loss)
    check_exact(made, requests)
    for pid in pids:
        assert not is_running(pid)


@pytest.mark.long
@pytest.mark.parametrize(
    ("placement", "devices"),
    [("tensor=3,hosts=3", 1), ("data=2,hosts=2", 1), ("data=4,hosts=4", 1)],
)
def test_the_default_model_answers_the_oracle(monkeypatch, placement, devices):
    """All nine cases, in one batch."""
    have_devices(monkeypatch, devices)
    config = EngineConfig(
        "tpu:0", placement=placement, dtype="float32", max_batch=9, context=256,
        token_budget=64, sampling="greedy",
    )  # fmt: skip
    with InferenceEngine.from_pretrained(config=config) as engine:
        prompts = [case["prompt_ids"] for case in ORACLE]
        found = engine.generate(prompts, max_tokens=64)
    compared = [
        compare(answer.token_ids, case["token_ids"], case["margins"])
        for answer, case in zip(found, ORACLE, strict=True)
    ]
    assert all(each.allowed("float32") for each in compared)
    assert sum(each.gap is None for each in compared) >= 8
