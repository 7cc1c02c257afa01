"""Children that end, hang, or leave processes that hold their pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from select import select
from shutil import which

import pytest

from inl.checkpoints.hub.wheel import _run
from inl.errors import WorkerLost
from inl.exit_status import read_output
from inl.tune import process as tuning
from inl.tune.trials import TuningOptions
from waiting import is_running, until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="uses a shell")

HOLD = "sleep 600 & echo $! >&2;"
"""Starts a process that holds the pipes, and writes its id."""


def child(script):
    return subprocess.Popen(
        ["sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_the_output_of_a_process_that_ends():
    with child("echo out; echo err >&2; exit 3") as process:
        assert read_output(process, 300) == (b"out\n", b"err\n", False)
        assert process.returncode == 3


@pytest.mark.parametrize("status", [0, 7])
def test_a_process_that_is_left_is_not_waited_for(status):
    with child(f"{HOLD} echo out; exit {status}") as process:
        output, errors, is_late = read_output(process, 300)
        assert (output, is_late, process.returncode) == (b"out\n", False, status)
    until(lambda: not is_running(int(errors)))


@pytest.mark.skipif(not which("setsid"), reason="needs setsid")
def test_a_process_of_another_group_is_not_waited_for():
    with child(f"setsid {HOLD} echo out") as process:
        output, errors, is_late = read_output(process, 300)
        assert (output, is_late) == (b"out\n", False)
    with suppress(ProcessLookupError):
        os.kill(int(errors), signal.SIGKILL)


@pytest.mark.parametrize(
    "script", [f"echo out; {HOLD} wait", "echo out; exec sleep 600 >&- 2>&-"]
)
def test_a_process_that_hangs_is_killed(script):
    with child(script) as process:
        assert select([process.stdout], [], [], 300)[0], "it has begun"
        output, errors, is_late = read_output(process, 1.0)
        assert (output, is_late) == (b"out\n", True)
        assert process.returncode == -signal.SIGKILL
    until(lambda: not errors or not is_running(int(errors)))


def test_a_program_that_leaves_a_process_has_run():
    ticks = []
    script = f"{HOLD} echo done; exit 4"
    status, output = _run(["sh", "-c", script], {**os.environ}, lambda: ticks.append(0))
    lines = output.split()
    os.kill(int(lines[0]), signal.SIGKILL)
    assert (status, lines[1]) == (4, "done")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"{HOLD} exit 5", "ended with exit status 5"),
        ("exec sleep 600 >&-", "was killed by SIGKILL"),
    ],
)
def test_a_measuring_process_that_ends_or_closes_its_pipe(
    monkeypatch, tmp_path, script, reason
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(WorkerLost, match=reason):
        tuning.Child(TuningOptions(device="cpu"), 0, limit=300.0)
