"""Numbers of cores on macOS and Windows, with their kernels' functions replaced."""

from __future__ import annotations

import ctypes
import struct
import sys
from types import SimpleNamespace

import pytest

from inl_cpu import cores, system_cores
from inl_cpu.system_cores import FAST_CORES


def mac(monkeypatch, answers):
    def read(name, count, size, new, new_size):
        assert (size._obj.value, new, new_size) == (4, None, 0)
        count._obj.value = answers.get(name, 0)
        return 0 if name in answers else -1

    monkeypatch.setattr(sys, "platform", "darwin")
    library = SimpleNamespace(sysctlbyname=read)
    monkeypatch.setattr(system_cores.ctypes, "CDLL", lambda _: library)


def windows(monkeypatch, relations):
    """Entries of 32 bytes: a mask, a relation, padding, and 16 bytes of details."""
    data = b"".join(struct.pack("<QI4xQQ", 3, each, 1, 0) for each in relations)

    def read(buffer, size):
        size._obj.value = len(data)
        if buffer is None:
            return 0
        ctypes.memmove(buffer, data, len(data))
        return 1

    monkeypatch.setattr(sys, "platform", "win32")
    kernel = SimpleNamespace(GetLogicalProcessorInformation=read)
    fake = SimpleNamespace(kernel32=kernel)
    monkeypatch.setattr(ctypes, "windll", fake, raising=False)


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        ({FAST_CORES[0]: 4, FAST_CORES[1]: 8}, 4),  # ARM: 4 of 8 are fast
        ({FAST_CORES[1]: 6}, 6),  # Intel
        ({}, None),
    ],
)
def test_macos_counts_its_fast_cores(monkeypatch, answers, count):
    mac(monkeypatch, answers)
    assert system_cores.system_cores() == count


@pytest.mark.parametrize(
    ("relations", "count"), [([0, 2, 2, 0, 3, 0], 3), ([2, 3], None), ([], None)]
)
def test_windows_counts_cores_without_their_hardware_threads(
    monkeypatch, relations, count
):
    windows(monkeypatch, relations)
    assert system_cores.system_cores() == count


def test_threads_are_the_cores_of_the_system(monkeypatch):
    monkeypatch.delenv(cores.THREADS, raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    windows(monkeypatch, [0] * 5)
    assert cores.count_threads() == 5


def test_linux_reads_its_files_instead():
    assert system_cores.system_cores() is None or sys.platform != "linux"
