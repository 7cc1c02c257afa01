"""The file that several servers read their engines from."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from inl.errors import RequestError
from inl.fleet.replica_file import ReplicaFile

TEXT = """# engines of the fleet
10.0.0.1:7000
  10.0.0.2:7000   drain   # a new disk
[::1]:7000 drain=2.5

host.example:7000
"""
ENGINES = {
    "10.0.0.1:7000": None,
    "10.0.0.2:7000": 60.0,
    "[::1]:7000": 2.5,
    "host.example:7000": None,
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "engines"
    path.write_text(TEXT, "utf-8")
    return ReplicaFile(path, 60.0)


def test_lines_are_engines(file):
    assert file.read() == ENGINES


def test_it_is_news_once(file):
    assert file.news() == ENGINES
    assert file.news() is None
    file.write("10.0.0.9:7000", "")
    assert file.news() == {**ENGINES, "10.0.0.9:7000": None}
    assert file.news() is None


def test_a_change_leaves_other_lines(file):
    file.path.chmod(0o640)
    file.write("10.0.0.1:7000", "drain=3")
    file.write("[::1]:7000", "")
    file.write("host.example:7000", None)
    file.write("nowhere:1", None)
    changed = TEXT.replace("10.0.0.1:7000", "10.0.0.1:7000 drain=3")
    changed = changed.replace(" drain=2.5", "").replace("host.example:7000\n", "")
    assert file.path.read_text("utf-8") == changed
    assert file.path.stat().st_mode & 0o777 == 0o640
    assert {each.name for each in file.path.parent.iterdir()} == {
        "engines",
        "engines.lock",
    }


def test_a_link_stays_one(file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(file.path)
    ReplicaFile(link, 60.0).write("10.0.0.9:7000", "")
    assert link.is_symlink()
    assert "10.0.0.9:7000" in file.read()


def test_changes_at_the_same_time_are_all_made(file):
    addresses = [f"10.1.0.{number}:7000" for number in range(24)]
    others = [ReplicaFile(file.path, 60.0) for _ in addresses]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each, one: each.write(one, ""), others, addresses))
    assert file.read() == ENGINES | dict.fromkeys(addresses)


@pytest.mark.parametrize(
    "line",
    ["10.0.0.1", "a:b", "10.0.0.7:1 stop", "10.0.0.7:1 drain=-1", "10.0.0.7:1 drain=x",
     "10.0.0.7:1 drain=inf", "10.0.0.7:1 drain 3", "10.0.0.1:7000"],
)  # fmt: skip
def test_other_lines_are_refused(file, line):
    file.path.write_text(f"{TEXT}{line}\n", "utf-8")
    with pytest.raises(RequestError, match=f"{file.path}, line 7: found"):
        file.read()


def test_a_change_that_fails_leaves_nothing(file, monkeypatch):
    def fail(*_):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(PermissionError):
        file.write("10.0.0.9:7000", "")
    assert file.path.read_text("utf-8") == TEXT
    assert {each.name for each in file.path.parent.iterdir()} == {
        "engines",
        "engines.lock",
    }
