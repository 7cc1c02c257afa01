"""Opening a GPU during the import of torch, with a driver that records calls."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest

from inl.device import Device
from inl.errors import BackendUnavailable

pytest.importorskip("torch")

import torch

from inl_cuda import startup


class Driver:
    """Records calls, and fails in one of them."""

    def __init__(self, failing=""):
        self.failing, self.calls = failing, []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *(a for a in args if isinstance(a, int))))
            return 100 if name == self.failing else 0

        return call


@pytest.fixture
def driver(monkeypatch):
    def make(failing=""):
        found = Driver(failing)
        monkeypatch.setattr(ctypes, "CDLL", lambda _name: found)
        return found

    return make


def test_creates_the_context_of_the_given_gpu(driver, monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    found = driver()
    startup.create_context(3)
    names = [call[0] for call in found.calls]
    assert names == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert found.calls[1] == ("cuDeviceGet", 3)


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet"])
def test_driver_errors_are_left_to_torch(driver, failing):
    found = driver(failing)
    startup.create_context(0)
    assert found.calls[-1][0] == failing


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a CUDA device")
def test_without_cuda_raises_and_cleans_up():
    before = {*threading.enumerate()}
    with pytest.raises(BackendUnavailable, match="finds no usable CUDA"):
        startup.open_backend(Device("cuda:0"))
    assert gc.isenabled()
    assert {*threading.enumerate()} <= before
