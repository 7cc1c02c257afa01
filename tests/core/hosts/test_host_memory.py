"""Host memory where a container has less than the machine."""

from __future__ import annotations

import sys

import pytest

from inl.backend import host

GIB = 1 << 30
STAT = "anon 1\n{0}active_file {1}\n{0}inactive_file {2}\nlast line of another form\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sets the files of a machine with 64 GiB, 40 of which are free."""
    files = {"/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {40 << 20} kB"}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(host, "_total", lambda: 64 * GIB)
    monkeypatch.setattr(host, "read_text", lambda path: files.get(path.as_posix(), ""))
    return files


def limited(files, version, limit, usage, cached=(0, 0)):
    folder = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
    names = {2: ("max", "current"), 1: ("limit_in_bytes", "usage_in_bytes")}[version]
    for name, value in zip(names, (limit, usage), strict=True):
        files[f"{folder}/memory.{name}"] = str(value)
    prefix = "total_" if version == 1 else ""
    files[f"{folder}/memory.stat"] = STAT.format(prefix, *cached)


def test_the_machine_is_the_limit_without_a_container(machine):
    assert host.host_memory() == (64 * GIB, 40 * GIB)
    limited(machine, 2, "max", 60 * GIB)
    limited(machine, 1, (1 << 63) - 4096, 60 * GIB)
    assert host.host_memory() == (64 * GIB, 40 * GIB)
    machine.clear()
    assert host.host_memory() == (64 * GIB, 32 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_uses_is_not_free(machine, version):
    limited(machine, version, 16 * GIB, 10 * GIB)
    assert host.host_memory() == (16 * GIB, 6 * GIB)
    # Pages of files are taken back when they are needed.
    limited(machine, version, 16 * GIB, 10 * GIB, (2 * GIB, 3 * GIB))
    assert host.host_memory() == (16 * GIB, 11 * GIB)
    limited(machine, version, 50 * GIB, GIB)
    assert host.host_memory() == (50 * GIB, 40 * GIB)  # others use the machine too
    limited(machine, version, GIB, 2 * GIB)
    assert host.host_memory() == (GIB, 0)
