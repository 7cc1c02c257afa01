"""Engines whose workers Slurm, Kubernetes or torchrun start: the files of ``deploy``.

Their launchers are stood in for by processes with the variables that they set, except
torchrun, which runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from byte_tokens import byte_rules
from free_ports import unused_address
from http_servers import READY
from inl.testing.tiny import plain_logits, tiny_llama
from waiting import is_running, until

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMPT, COUNT = [5, 17, 80, 3, 44, 9], 8
NAMES = re.compile(r"SLURM_|LWS_|RANK$|INL_WORKER")

SRUN = """#!{python}
# Stands in for srun: starts the tasks of two nodes, the last one first.
import os, subprocess, sys
assert sys.argv[1] == "--ntasks=2", sys.argv
assert sys.argv[2] == "--kill-on-bad-exit=1", sys.argv
words = sys.argv[3:]
tasks = []
for number in (1, 0):
    numbers = {{"SLURM_PROCID": str(number), "SLURM_LOCALID": "0"}}
    tasks.append(subprocess.Popen(words, env=os.environ | numbers))
    with open(os.environ["TASKS"], "a") as file:
        print(tasks[-1].pid, file=file)
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture(scope="module")
def made():
    return tiny_llama(np.random.default_rng(8), vocab=256, kv_heads=2)


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A folder with a model, and with the program ``inl`` in the path."""
    for name in filter(NAMES.match, list(os.environ)):
        monkeypatch.delenv(name)
    model, programs = tmp_path / "model", tmp_path / "bin"
    model.mkdir()
    programs.mkdir()
    (model / "config.json").write_text(json.dumps(made[0]))
    save_file(made[1], model / "model.safetensors")
    byte_rules().save(str(model / "tokenizer.json"))
    script(programs / "inl", f'#!/bin/sh\nexec "{sys.executable}" -m inl "$@"\n')
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Started:
    """Processes that must have ended at the end, each with a file for its log."""

    def __init__(self, folder):
        self.folder, self.processes, self.logs = folder, [], []

    def begin(self, words, **variables):
        self.logs.append(self.folder / f"{len(self.logs)}.log")
        with self.logs[-1].open("w") as log:
            process = subprocess.Popen(
                words, env=os.environ | variables, stderr=log, stdout=log,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def url(self, at):
        """Wait until a server is ready, and return its address."""

        def ready():
            text = self.logs[at].read_text()
            assert self.processes[at].poll() is None, self.said()
            return READY.search(text)

        until(ready)
        return ready()[1].replace("0.0.0.0", "127.0.0.1")

    def said(self):
        return "\n".join(log.read_text() for log in self.logs)


@pytest.fixture
def started(place):
    found = Started(place)
    yield found
    for each in found.processes:
        with suppress(ProcessLookupError):  # what a failed test has left, too
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def check_answer(url, made, key=None):
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.load(reply)
    ids = answer["choices"][0]["token_ids"]
    exact = plain_logits(*made, [*PROMPT, *ids[:-1]])[-COUNT:]
    assert ids == list(exact.argmax(-1))


OPTIONS = ["--dtype", "float32", "--context", "64", "--max-batch", "2"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_job_of_slurm(place, started, made):
    """Until the job is cancelled: nothing of it is left."""
    script(place / "bin" / "srun", SRUN.format(python=sys.executable))
    job = started.begin(
        ["bash", DEPLOY / "slurm.sh", place / "model", *OPTIONS],
        SLURM_NTASKS="2", SLURM_PROCID="0", SLURM_LOCALID="0", PORT="0",
        WORKER_PORT=unused_address().rpartition(":")[2], HOST_ADDRESS="127.0.0.1",
        DEVICE="reference:0", TASKS=str(place / "tasks"),
    )  # fmt: skip
    check_answer(started.url(0), made)
    assert "worker 1 of 127.0.0.1" in started.said()
    job.send_signal(signal.SIGTERM)
    assert job.wait(300) == 0, started.said()
    tasks = [int(line) for line in (place / "tasks").read_text().split()]
    assert len(tasks) == 2
    until(lambda: not any(map(is_running, tasks)))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_job_says_what_it_lacks():
    for words, says in (([], "usage: sbatch"), (["m"], "SLURM_NTASKS: is not set")):
        done = subprocess.run(
            ["bash", DEPLOY / "slurm.sh", *words], capture_output=True, text=True,
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        assert done.returncode != 0
        assert says in done.stderr


def expanded(words, variables):
    """What Kubernetes makes of ``$(NAME)``."""
    return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in words]


@pytest.mark.full
def test_a_leader_worker_set(place, started, made):
    """Its containers, with the variables that the controller sets."""
    yaml = pytest.importorskip("yaml")
    (place / "keys").write_text("a key\n")
    text = (DEPLOY / "leader-worker-set.yml").read_text()
    for name, value in {
        "7000": unused_address().rpartition(":")[2], "/inl/keys": place / "keys",
        "MODEL\n": f"{place / 'model'}\n", "cuda:0": "reference:0",
        "/opt/inl/bin/inl": place / "bin" / "inl",
    }.items():  # fmt: skip
        assert name in text
        text = text.replace(name, str(value))
    workload, service = yaml.safe_load_all(text)
    parts = workload["spec"]["leaderWorkerTemplate"]
    entry = re.search(r"ENTRYPOINT (.*)", (DEPLOY / "Containerfile.cuda").read_text())
    entry = [str(place / "bin" / "inl"), *json.loads(entry[1])[1:]]
    assert service["spec"]["selector"] == parts["leaderTemplate"]["metadata"]["labels"]
    secrets = {"secret": "5a" * 32}
    for index, kind in enumerate(("leaderTemplate", "workerTemplate")):
        for container in parts[kind]["spec"]["containers"]:
            variables = {
                "LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": str(parts["size"]),
                "LWS_LEADER_ADDRESS": "127.0.0.1",
            }  # fmt: skip
            for each in container["env"]:
                source = each["valueFrom"]
                key = source.get("secretKeyRef")
                variables[each["name"]] = secrets[key["key"]] if key else "127.0.0.1"
            words = container.get("command", entry) + container.get("args", [])
            words = expanded(words, variables)
            if container["name"] == "engine":
                words += [*OPTIONS, "--port", "0"]
            started.begin(words, **variables)
    check_answer(started.url(0), made, "a key")
    started.processes[0].terminate()
    assert [each.wait(300) for each in started.processes] == [0, 0, 0], started.said()
    for at, log in enumerate(started.logs[1:]):
        assert f"worker {at} of " in log.read_text()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("torchrun") is None, reason="needs torchrun")
def test_torchrun_on_two_hosts(place, started, made):
    """Each starts one worker, the host with rank 1 first."""
    workers, meeting = unused_address(), unused_address().rpartition(":")[2]
    secret = {"INL_WORKER_SECRET": "5a" * 32}
    started.begin(
        ["inl", "serve", str(place / "model"), *OPTIONS, "--port", "0",
         "--device", f"join:{workers}/reference:0", "--placement", "tensor=2"],
        **secret,
    )  # fmt: skip
    for number in (1, 0):
        started.begin(
            ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank",
             str(number), "--master-addr", "127.0.0.1", "--master-port", meeting,
             "--no-python", "inl", "worker", workers, "--wait", "300"],
            **secret,
        )  # fmt: skip
    check_answer(started.url(0), made)
    started.processes[0].terminate()
    assert [each.wait(300) for each in started.processes] == [0, 0, 0], started.said()
    assert "worker 0 of" in started.logs[2].read_text()
    assert "worker 1 of" in started.logs[1].read_text()
