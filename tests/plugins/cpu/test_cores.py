"""Thread count: affinity, hardware threads, cgroup quotas and INL_THREADS."""

from __future__ import annotations

import pytest

from inl.errors import DeviceError
from inl_cpu import cores


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path):
    """A machine with eight processors on four cores and no limits."""
    monkeypatch.delenv("INL_THREADS", raising=False)
    monkeypatch.setattr(cores, "allowed_processors", lambda: set(range(8)))
    monkeypatch.setattr(cores, "CPUS", tmp_path / "cpu")
    monkeypatch.setattr(cores, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "groups")
    for number in range(8):
        place = tmp_path / "cpu" / f"cpu{number}" / "topology"
        place.mkdir(parents=True)
        siblings = f"{number % 4},{number % 4 + 4}\n"
        (place / "thread_siblings_list").write_text(siblings)
    return tmp_path


def limit(host, path, files, *, version=2):
    line = f"0::{path}\n" if version == 2 else f"4:cpu,cpuacct:{path}\n"
    (host / "cgroup").write_text(line)
    root = host / "groups" / ("" if version == 2 else "cpu")
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_one_thread_per_core():
    assert cores.count_threads() == 4


def test_affinity_limits_threads(monkeypatch):
    monkeypatch.setattr(cores, "allowed_processors", lambda: {1, 2, 6})
    assert cores.count_threads() == 2


def test_one_core(monkeypatch):
    monkeypatch.setattr(cores, "allowed_processors", lambda: {5})
    assert cores.count_threads() == 1


def test_without_topology_every_processor_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "CPUS", tmp_path / "none")
    assert cores.count_threads() == 8


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("max 100000\n", 4),
        ("9900000 100000\n", 4),
        ("", 4),
        ("nonsense\n", 4),
        ("100000 0\n", 4),
    ],
)
def test_cgroup_quota(host, text, threads):
    limit(host, "/app", {"app/cpu.max": text})
    assert cores.count_threads() == threads


def test_quota_of_an_ancestor(host):
    files = {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "300000 100000\n"}
    limit(host, "/a/b", files)
    assert cores.count_threads() == 1


def test_quota_at_the_root_of_a_container(host):
    limit(host, "/docker/0123", {"cpu.max": "300000 100000\n"})
    assert cores.count_threads() == 3


def test_cgroups_v1(host):
    files = {"a/cpu.cfs_quota_us": "200000\n", "a/cpu.cfs_period_us": "100000\n"}
    limit(host, "/a", files, version=1)
    assert cores.count_threads() == 2
    files["a/cpu.cfs_quota_us"] = "-1\n"
    limit(host, "/a", files, version=1)
    assert cores.count_threads() == 4


def test_the_variable_overrides_all_limits(host, monkeypatch):
    limit(host, "/app", {"app/cpu.max": "100000 100000\n"})
    monkeypatch.setenv("INL_THREADS", "7")
    assert cores.count_threads() == 7


@pytest.mark.parametrize("found", ["0", "-1", "two", "1.5", " 2", "٣", "4097"])
def test_an_invalid_variable_is_refused(found, monkeypatch):
    monkeypatch.setenv("INL_THREADS", found)
    with pytest.raises(DeviceError, match=r"INL_THREADS: found .* from 1 to 4096"):
        cores.count_threads()
