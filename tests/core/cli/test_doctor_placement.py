"""``inl doctor --placement``: what is wrong at a place, before a model is loaded."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from inl.cli import checks_placement
from inl.cli.checks_placement import _model
from inl.cli.main import main
from inl.runners import place_check
from inl.workers.settings import SECRET

HERE = f"worker:{sys.executable}/reference:0"


@pytest.fixture
def model(tiny_folder):
    return tiny_folder


def doctor(capsys, model, *words):
    """Return the exit code, and the status and finding of each check but "ok"."""
    code = main(["doctor", "--json", "--model", str(model), *words])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    return code, found["checks"]


def bad(checks):
    return [(each["status"], each["finding"]) for each in checks if each["fix"]]


def test_the_places_of_two_ranks_are_checked(capsys, model):
    code, checks = doctor(
        capsys, model, "--placement", "tensor=2", "--device", "reference:0"
    )
    assert (code, bad(checks)) == (0, [])
    digest = place_check.inspect({"model": str(model)})["model"]
    for rank in range(2):
        name = f"rank {rank}, {HERE}"
        lines = [each["finding"] for each in checks if each["subject"] == name]
        assert len(lines) == 4
        assert lines[0].startswith("process ")
        assert "its clock is " in lines[1]
        assert lines[2:] == [
            "has reference:0", f"has the model, digest {digest[:12]}"
        ]  # fmt: skip
    pids = {
        each["finding"].split()[1] for each in checks if "process" in each["finding"]
    }
    assert len(pids) == 2
    (sums,) = [each["finding"] for each in checks if each["subject"] == "tensor=2"]
    found = re.fullmatch(
        r"a sum of 4 KiB takes ([\d.]+) us, one of 16 MiB ([\d.]+) GB/s", sums
    )
    assert all(float(number) > 0 for number in found.groups())


def test_ranks_that_do_not_exchange_are_named(capsys, model, monkeypatch):
    monkeypatch.setattr(checks_placement, "reserve_address", nowhere)
    monkeypatch.setattr(checks_placement, "JOIN_SECONDS", 1.0)
    code, checks = doctor(
        capsys, model, "--placement", "data=2", "--device", "reference:0"
    )
    ((status, finding),) = bad(checks)
    assert (code, status) == (1, "wrong")
    assert "cannot exchange: rank" in finding


def nowhere():
    """An address at which no rank can listen, so that rank 0 fails, and others too."""
    return "192.0.2.1:1", socket.socket()


def test_another_clock_and_another_model_are_named(capsys, model, monkeypatch):
    """Of this process, so that those of the worker are the others."""
    now = time.time
    clock = SimpleNamespace(time=lambda: now() + 600, monotonic=time.monotonic)
    monkeypatch.setattr(place_check, "time", clock)
    monkeypatch.setattr(place_check, "inspect", lambda _: {"model": "0" * 64})
    code, checks = doctor(capsys, model, "--device", HERE)
    assert code == 1
    (wrong, warning) = bad(checks)
    digest = [each["finding"] for each in checks if "digest" in each["finding"]]
    assert wrong[0] == "wrong"
    assert digest == [wrong[1]]
    assert wrong[1].endswith("here 000000000000")
    assert warning[0] == "warn"
    assert "s behind ours" in warning[1]
    assert 590 < float(warning[1].split()[3]) < 601


def test_an_absent_device_is_named(capsys, model):
    code, checks = doctor(capsys, model, "--device", HERE.replace("reference", "npu"))
    assert code == 1
    ((status, finding),) = bad(checks)
    assert status == "wrong"
    assert "no backend for npu" in finding


def test_a_worker_that_does_not_come_is_named(capsys, model, monkeypatch):
    monkeypatch.setenv(SECRET, "0" * 64)
    code, checks = doctor(
        capsys, model, "--device", "join:127.0.0.1:0/reference:0", "--wait", "0"
    )
    assert code == 1
    ((status, finding),) = bad(checks)
    assert status == "wrong"
    assert "did not connect to 127.0.0.1:" in finding


@pytest.mark.full
def test_workers_that_join_reach_each_other(capsys, model, monkeypatch):
    monkeypatch.setenv(SECRET, "0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "inl", "worker", address]
    workers = [subprocess.Popen(command) for _ in range(2)]
    device = f"join:{address}/reference:0"
    code, checks = doctor(capsys, model, "--placement", "tensor=2", "--device", device)
    assert (code, bad(checks)) == (0, [])
    (reached,) = [each for each in checks if "reaches rank 0" in each["finding"]]
    assert reached["subject"] == f"rank 1, {device}"
    assert [each.wait() for each in workers] == [0, 0], "nothing is left running"


def test_what_a_worker_finds():
    found = place_check.inspect({"model": "/nowhere", "reach": "127.0.0.1:1"})
    assert abs(found["clock"] - time.time()) < 60
    assert found["reach"] == "127.0.0.1:1"  # refused, so its host answers
    check = _model("rank 0", found, "/nowhere", {"model": "1" * 64})
    assert check.status == "wrong"
    assert "/nowhere" in check.finding
    assert "reach_problem" in place_check.inspect({"reach": "nowhere"})
