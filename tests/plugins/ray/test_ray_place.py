"""Workers in a Ray cluster of three hosts: ``make test-ray``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from ray_hosts import HOSTS, PORT
from waiting import until

CLUSTER = {"RAY_ADDRESS": f"{HOSTS[0]}:{PORT}"}
PROMPT = "The capital of France is"
GENERATE = ("-m", "inl", "generate", PROMPT, "--max-tokens", "12", "--device")
LIMIT = 300

ENGINE = """
import sys
from inl import EngineConfig, InferenceEngine
from inl.errors import InlError
config = EngineConfig(backend=sys.argv[1], on_worker_loss=sys.argv[2])
with InferenceEngine.from_pretrained(config=config) as engine:
    print("ready", getattr(engine.runner, "pid", 0), flush=True)
    text = ""
    try:
        for part in engine.stream(sys.argv[3], max_tokens=150):
            text += part
            if len(text) > 40:
                print("streaming", flush=True)
    except InlError as error:
        print("lost", error, flush=True)
    else:
        print("text", repr(text), flush=True)
"""


@pytest.fixture(scope="module")
def plain(hosts):
    """The text of an engine without Ray."""
    done = hosts.run(0, sys.executable, *GENERATE, "cpu:0")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["", f"{HOSTS[1]}/", f"{HOSTS[2]}/"])
def test_a_worker_of_the_cluster_gives_the_same_text(hosts, plain, target):
    done = hosts.run(0, sys.executable, *GENERATE, f"ray:{target}cpu:0", **CLUSTER)
    assert done.returncode == 0, done.stderr
    # Ray passes the output of workers on, on standard output.
    assert plain.strip() in done.stdout


def test_devices_of_the_cluster_are_listed(hosts):
    words = "-m", "inl", "devices", "--place", "ray:", "--json"
    done = hosts.run(0, sys.executable, *words, **CLUSTER)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["device"] for row in rows] == [f"ray:{each}/cpu:0" for each in HOSTS]


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("ray:10.9.9.9/cpu:0", "found 0 hosts"),
        ("ray:cuda:0", "a worker takes 1 GPU, found 10.77.0.1: 1 CPU"),
    ],
)
def test_what_the_cluster_has_not_is_refused(hosts, device, sentence):
    done = hosts.run(0, sys.executable, *GENERATE, device, **CLUSTER)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_killed_worker_is_started_again_with_the_same_text(hosts):
    """On the same host: the cluster has room there once its actor is gone."""
    place = f"ray:{HOSTS[1]}/cpu:0"
    whole = hosts.run(0, sys.executable, "-c", ENGINE, "cpu:0", "raise", PROMPT)
    assert whole.returncode == 0, whole.stderr
    wanted = whole.stdout.splitlines()[-1]
    assert wanted.startswith("text")
    engine = hosts.start(
        0, sys.executable, "-c", ENGINE, place, "restart", PROMPT, **CLUSTER
    )
    try:
        lines = iter(engine.stdout.readline, "")
        ready = next(line for line in lines if line.startswith("ready"))
        next(line for line in lines if line.startswith("streaming"))
        os.kill(int(ready.split()[1]), signal.SIGKILL)
        last = next(line for line in lines if line.startswith(("text", "lost")))
    finally:
        _, errors = engine.communicate(timeout=LIMIT)
    assert last.strip() == wanted, errors
    until(lambda: not workers_of(hosts, 1))


def workers_of(hosts, host):
    """Return the processes of a host that are workers of an engine."""
    found = []
    for pid in hosts.processes(host):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"inl.runners.worker_main" in words:
            found.append(pid)
    return found
