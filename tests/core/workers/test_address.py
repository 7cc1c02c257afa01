"""Device names of workers."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from inl.device import Device
from inl.errors import DeviceError
from inl.workers.address import WorkerAddress, parse_worker
from inl.workers.launchers import Launched, device_here, read_launcher


@pytest.fixture
def python(tmp_path):
    """A link to this interpreter, in a folder with a space."""
    path = tmp_path / "a venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.symlink_to(sys.executable)
    return path


@pytest.mark.parametrize("name", ["cpu", "cuda:1", "auto", Device("cpu"), "workers"])
def test_other_devices_are_none_of_ours(name):
    assert parse_worker(name) is None


@pytest.mark.parametrize(
    ("device", "found"), [("cpu", "cpu:0"), ("tpu:3", "tpu:3"), ("auto", "auto")]
)
def test_an_absolute_path_with_spaces(python, device, found):
    address = parse_worker(f"worker:{python}/{device}")
    assert address == WorkerAddress(str(python), found)
    assert parse_worker(str(address)) == address


def test_a_link_is_not_followed(python):
    assert parse_worker(f"worker:{python}/cpu").target == str(python)


def test_relative_paths_and_home(python, monkeypatch):
    monkeypatch.chdir(python.parent.parent)
    monkeypatch.setenv("HOME", str(python.parent))
    for path in ("bin/python", "./bin/python", "~/python", "../a venv/bin/python"):
        assert parse_worker(f"worker:{path}/cpu").target == str(python)


def test_a_bare_name_is_a_command(python, monkeypatch):
    monkeypatch.setenv("PATH", str(python.parent))
    assert parse_worker("worker:python/cpu").target == str(python)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("worker:", "worker:PATH_TO_PYTHON/DEVICE"),
        ("worker:cpu", "worker:PATH_TO_PYTHON/DEVICE"),
        ("worker:/cpu", "worker:PATH_TO_PYTHON/DEVICE"),
        ("worker:/nowhere/python/cpu:0", "/nowhere/python does not exist"),
        ("worker:no-such-command/cpu:0", "no-such-command does not exist"),
        (f"worker:{os.path.dirname(sys.executable)}/cpu:0", "is a folder"),  # noqa: PTH120
        ("worker:a\0b/cpu:0", "worker:PATH_TO_PYTHON/DEVICE"),
    ],
)
def test_what_is_no_interpreter(name, words):
    with pytest.raises(DeviceError, match=words):
        parse_worker(name)


def test_a_file_that_may_not_run(tmp_path):
    path = tmp_path / "python"
    path.touch(0o644)
    with pytest.raises(DeviceError, match="is not executable"):
        parse_worker(f"worker:{path}/cpu:0")


@pytest.mark.parametrize("device", ["CPU", "cpu:x", "worker:0:0", ""])
def test_a_bad_device_behind_a_good_path(python, device):
    with pytest.raises(DeviceError):
        parse_worker(f"worker:{python}/{device}")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, Launched()),
        ({"TPU_WORKER_ID": "3"}, Launched(3)),
        ({"RANK": "5", "LOCAL_RANK": "1"}, Launched(5, 1)),
        ({"RANK": "5"}, Launched()),
        ({"SLURM_PROCID": "6", "SLURM_LOCALID": "2"}, Launched(6, 2)),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "RANK": "5", "LOCAL_RANK": "3"},
         Launched(5, 3)),
        ({"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}, Launched(1, 0)),
        ({"LWS_WORKER_INDEX": "1", "RANK": "7", "LOCAL_RANK": "3"}, Launched(7, 3)),
        ({"LWS_WORKER_INDEX": "0", "TPU_WORKER_ID": "1"}, Launched(1)),
    ],
    ids=str,
)  # fmt: skip
def test_launchers_number_their_workers(settings, found):
    assert read_launcher(settings) == found


@pytest.mark.parametrize("name", ["TPU_WORKER_ID", "SLURM_LOCALID"])
@pytest.mark.parametrize("text", ["", "one", "65535", "-1", "9" * 30])
def test_what_is_no_number_of_a_worker(name, text):
    settings = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", name: text}
    with pytest.raises(DeviceError, match=f"{name}: found"):
        read_launcher(settings)


def test_workers_of_a_host_take_a_device_each(monkeypatch):
    """The engine counts the devices of all hosts."""

    def have(*indices):
        devices = [SimpleNamespace(index=index) for index in indices]
        probed = SimpleNamespace(find=lambda _: SimpleNamespace(devices=devices))
        monkeypatch.setattr("inl.plugin.registry", lambda: probed)

    have(0, 1, 2, 3)
    assert [device_here(f"cuda:{4 + n}", n) for n in range(4)] == [
        "cuda:0", "cuda:1", "cuda:2", "cuda:3"
    ]  # fmt: skip
    with pytest.raises(DeviceError, match=r"worker 4 of this host: found cuda:0, "):
        device_here("cuda:8", 4)
    have(0)  # the launcher shows each worker one
    assert device_here("cuda:5", 3) == "cuda:0"
    assert device_here("cpu:0", 3) == "cpu:0"
    assert device_here("auto", 3) == "auto"
    have()
    assert device_here("cuda:5", 3) == "cuda:5"
