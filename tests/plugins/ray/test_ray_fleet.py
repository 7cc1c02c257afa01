"""Engines of a fleet as actors of a Ray cluster of two CPUs: ``--place ray:``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import ray

from depth import SEED
from fleets import FOLDER, LONG, SLOW, TEXT, EngineProcess, Fleet, answered, ids_of
from http_servers import HashServer, hash_engine
from inl.cli import serve_fleet
from inl.cli.main import main
from inl.fleet.placed_engines import PlacedEngines
from inl.workers.address import WorkerAddress
from waiting import until

pytestmark = [
    # Ray sets fields of its own that it has deprecated, and leaves files open.
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODULE = EngineProcess.script.removesuffix(".py")
"""Of engines on hashes, which take the settings of real ones."""

LINES = int(os.environ.get("INL_BATCH_LINES", "600"))
TOKENS = 6
TIMEOUT = 600 + LINES // 10
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), *sys.path])),
    "INL_PLUGINS": "inl_cpu.plugin,inl_ray.plugin",
    "OMP_NUM_THREADS": "1",
    "INL_THREADS": "1",
    "TEST_RUN": str(os.getpid()),
}


@pytest.fixture(scope="module")
def cluster():
    """Ray with two CPUs, whose processes find the packages under test."""
    ray.init(
        "local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000,
        runtime_env={"env_vars": ENVIRONMENT}, logging_level="warning",
        log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


def engines_of_actors():
    """Return the processes that compute, of this run of the tests."""
    found, mark = [], f"TEST_RUN={os.getpid()}".encode()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                marked = mark in (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                marked
                and b"--connect" in words
                and any(MODULE.encode() in each for each in words)
            ):
                found.append(int(path.name))
    return found


def states(fleet):
    return [each["state"] for each in fleet.send("GET", "/load")[2]["replicas"]]


def test_a_stream_of_a_killed_actor_goes_on_and_the_actor_is_replaced(cluster):
    place = WorkerAddress("", "cpu:0", "ray")
    local = PlacedEngines(place, MODULE, SLOW, 2, 5.0)
    with HashServer(max_batch=8) as plain:
        wanted = answered(plain)
    with Fleet([], secret=local.secret, local=local) as fleet:
        until(lambda: states(fleet) == ["ready"] * 2)
        before = set(engines_of_actors())
        assert len(before) >= 2, "with the processes of their signs of life"
        lines = []
        for line in fleet.stream(TEXT, LONG):
            lines.append(line)
            if len(lines) == 1:
                for pid in before:  # the one that computes, and the other one
                    os.kill(pid, signal.SIGKILL)
        assert ids_of(lines) == wanted
        assert fleet.counts["continued"]
        until(lambda: states(fleet) == ["ready"] * 2)
        assert before.isdisjoint(engines_of_actors())
    until(lambda: not engines_of_actors())


KILLED = """
import json, os, signal, sys
from contextlib import contextmanager
import ray
from inl.cli import run_batch, serve_fleet
from inl.cli.main import main

address, environment, module, left = json.loads(sys.argv[1])

@contextmanager
def bar(total, label):
    def tick():
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    yield tick

run_batch.bar, serve_fleet.MODULE = bar, module
ray.init(address, namespace="inl", runtime_env={"env_vars": environment})
sys.exit(main(sys.argv[2:]))
"""
"""The command, which is killed after so many answers."""


@pytest.mark.timeout(TIMEOUT)
def test_a_batch_that_is_interrupted_has_one_answer_a_line(
    cluster, tmp_path, monkeypatch, capsys
):
    """``INL_BATCH_LINES`` is the number of lines."""
    monkeypatch.setattr(serve_fleet, "MODULE", MODULE)
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with requests.open("w") as file:
        for number in range(LINES):
            body = {"prompt": prompt_of(number), "max_tokens": TOKENS, "seed": number}
            body |= {"ignore_eos": True, "return_token_ids": True, "temperature": 0.9}
            line = {"custom_id": str(number), "url": TEXT, "body": body}
            file.write(json.dumps(line) + "\n")
    words = ["run-batch", str(requests), str(answers), "--replicas", "2"]
    words += ["--place", "ray:", "--device", "cpu:0"]
    address = ray.get_runtime_context().gcs_address
    given = json.dumps([address, ENVIRONMENT, MODULE, LINES // 3])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, given, *words], env=os.environ | ENVIRONMENT,
        check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    until(lambda: not engines_of_actors())
    with answers.open("ab") as file:
        file.write(b'{"id": "batch_req_')
    assert main(words) == 0
    said = capsys.readouterr().err
    counts = [int(each.split()[0]) for each in said.splitlines() if "before" in each]
    before = counts[-1]  # of the second run, which was not killed
    assert LINES // 3 - 1 <= before < LINES
    seen = bytearray(LINES)
    checked = set(Random(SEED).sample(range(LINES), min(LINES, 200)))
    with hash_engine(4) as twin, answers.open("rb") as file:
        for text in file:
            line = json.loads(text)
            number = int(line["custom_id"])
            seen[number] += 1
            assert line["response"]["status_code"] == 200, line
            if number in checked:
                done = twin.generate(
                    prompt_of(number), max_tokens=TOKENS, seed=number, temperature=0.9,
                    ignore_eos=True,
                )  # fmt: skip
                (choice,) = line["response"]["body"]["choices"]
                assert tuple(choice["token_ids"]) == done.token_ids
    assert seen == b"\1" * LINES


def prompt_of(number):
    return [number % 997, number // 997, 5]
