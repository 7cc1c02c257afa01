"""NUMA nodes that memory is interleaved over, and the system call."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from inl_cpu import memory, numa


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Two sockets with four processors each, and a third node with memory only."""
    monkeypatch.setattr(numa, "allowed_processors", lambda: set(range(8)))
    monkeypatch.setattr(numa, "NODES", tmp_path / "node")
    monkeypatch.setattr(numa, "STATUS", tmp_path / "status")
    for number, processors in enumerate(("0-3\n", "4-5,6-7\n", "\n")):
        place = tmp_path / "node" / f"node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(processors)
    (tmp_path / "node" / "has_memory").write_text("0-2\n")
    (tmp_path / "status").write_text("Name:\tinl\nMems_allowed_list:\t0-2\n")
    return tmp_path


def test_nodes_with_processors(host):
    assert numa.usable_nodes() == [0, 1]


def test_affinity_limits_nodes(host, monkeypatch):
    monkeypatch.setattr(numa, "allowed_processors", lambda: {5, 6})
    assert numa.usable_nodes() == [1]


def test_cgroup_limits_nodes(host):
    (host / "status").write_text("Mems_allowed_list:\t0,2\n")
    assert numa.usable_nodes() == [0]
    (host / "status").write_text("")
    assert numa.usable_nodes() == [0, 1]


def test_a_node_without_memory(host):
    (host / "node" / "has_memory").write_text("1\n")
    assert numa.usable_nodes() == [1]


def test_without_node_information(host, monkeypatch):
    monkeypatch.setattr(numa, "NODES", host / "none")
    assert numa.usable_nodes() == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("7", {7}),
        ("", set()),
        ("\n", set()),
        ("0-x", set()),
        ("1,", set()),
    ],
)
def test_parse_set(text, found):
    assert numa.parse_set(text) == found


def policy(address):
    """Memory policy of the mapping at an address."""
    with Path("/proc/self/numa_maps").open() as file:
        for line in file:
            begin, rest = line.split(maxsplit=1)
            if int(begin, 16) == address:
                return rest.split()[0]
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="mbind is Linux's")
def test_pages_are_interleaved():
    with mmap.mmap(-1, 1 << 22) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        start = memory.address(array)
        known = numa.usable_nodes()
        done = bool(known) and numa.bind_pages(start, array.nbytes, known)
        if done:
            assert policy(start).startswith("interleave:")
        elif (numa.NODES / "node0").exists():
            pytest.skip("this system does not permit memory policies")
        assert not array.any()
        del array


def test_large_allocations_are_interleaved(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "interleave", lambda *place: calls.append(place))
    small, large = memory.zeros(1000), memory.zeros(memory.INTERLEAVED)
    assert len(calls) == 1
    start, size = calls[0]
    assert start <= memory.address(large) < start + size
    assert not small.any()


def test_a_single_node_is_not_bound(monkeypatch):
    monkeypatch.setattr(numa, "_cached_nodes", lambda: [0])
    monkeypatch.setattr(numa, "bind_pages", None)
    assert not numa.interleave(1 << 20, 1 << 22)


def test_less_than_a_page_is_not_bound():
    assert not numa.bind_pages(mmap.PAGESIZE + 1, mmap.PAGESIZE, [0])
