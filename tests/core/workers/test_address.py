"""Device names of workers."""

from __future__ import annotations

import os
import sys

import pytest

from inl.device import Device
from inl.errors import DeviceError
from inl.workers.address import WorkerAddress, parse_worker
from inl.workers.settings import read_seat


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


def test_the_number_of_a_tpu_host_is_read():
    assert read_seat({}) is None
    assert read_seat({"TPU_WORKER_ID": "3"}) == 3
    for text in ("", "one", "65535", "-1", "9" * 30):
        with pytest.raises(DeviceError, match="TPU_WORKER_ID: found"):
            read_seat({"TPU_WORKER_ID": text})
