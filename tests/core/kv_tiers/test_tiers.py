"""Tiers of blocks: what they keep, what they refuse, and what a crash leaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from inl.config import EngineConfig
from inl.dtypes import wrap
from inl.errors import RequestError
from inl.kv_tiers import disk_tier, host_tier
from inl.kv_tiers.disk_tier import DiskTier, name_of
from inl.kv_tiers.host_size import automatic_bytes
from inl.kv_tiers.host_tier import HostTier, PacedGrowth
from inl.kv_tiers.record import Identity
from inl.kv_tiers.tiers import BlockTiers, Costs
from inl.spec.cache_layout import BlockLayout
from waiting import until

LAYOUT = BlockLayout(1, 4, 1, 8, "int32")
IDENTITY = Identity("model", "float32", (LAYOUT, LAYOUT))
BYTES = LAYOUT.block_bytes


def parts(number):
    cells = np.full((1, 2, 1, 4, 1, 8), number, np.int32)
    return {"cells": wrap(cells)}


def place(number):
    return number % 2, number.to_bytes(32, "little")


def number_of(found):
    values = set(found["cells"].data.reshape(-1).tolist())
    assert len(values) == 1
    return values.pop()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose tiers are closed at the end."""
    opened, init = [], DiskTier.__init__

    def remembered(self, *args, **options):
        init(self, *args, **options)
        opened.append(self)

    monkeypatch.setattr(DiskTier, "__init__", remembered)
    yield tmp_path / "kv"
    for disk in opened:
        disk.close()


def filled(folder, numbers, capacity=1 << 24):
    disk = DiskTier(folder, capacity, IDENTITY)
    for number in numbers:
        disk.put(place(number), parts(number))
    disk.flush()
    return disk


def test_the_oldest_block_in_memory_makes_room():
    host = HostTier(3 * BYTES)
    for number in range(3):
        assert list(host.put(place(number), parts(number))) == []
    assert number_of(host.get(place(0))) == 0
    (dropped,) = host.put(place(3), parts(3))
    assert dropped[0] == place(1)
    assert host.get(place(1)) is None
    assert (len(host), host.used_bytes) == (3, 3 * BYTES)
    assert list(host.put(place(3), parts(3))) == []
    host.clear()
    assert (len(host), host.used_bytes) == (0, 0)


def test_memory_that_may_not_grow_drops_the_oldest_block(monkeypatch):
    monkeypatch.setattr(host_tier, "GROWTH", 2 * BYTES)
    answers = []
    host = HostTier(5 * BYTES, may_grow=lambda: answers.pop(0))

    def store(numbers):
        dropped = []
        for number in numbers:
            dropped += [old for old, _ in host.put(place(number), parts(number))]
        return dropped

    answers[:] = [True]
    assert store(range(3)) == []
    assert answers == []  # nothing is asked before it is needed
    answers[:] = [False]
    assert store([3, 4]) == [place(0), place(1)]
    assert answers == []
    answers[:] = [False]  # asked again after as many bytes only
    assert store([5, 6]) == [place(2), place(3)]
    assert host.used_bytes == 3 * BYTES
    answers[:] = [True]
    assert store([7, 8]) == []
    assert store([9]) == [place(4)]
    assert (host.used_bytes, answers) == (5 * BYTES, [])


def test_memory_grows_no_faster_than_pages_are_mapped(monkeypatch):
    for name, size in (("GROWTH", 10), ("BURST", 40), ("RATE", 5)):
        monkeypatch.setattr(host_tier, name, size)
    now, room = [100.0], [True]
    may_grow = PacedGrowth(lambda: room[0], clock=lambda: now[0])
    assert [may_grow() for _ in range(6)] == [True] * 4 + [False] * 2
    now[0] += 1.9
    assert not may_grow()
    now[0] += 0.2
    room[0] = False
    assert not may_grow()
    room[0] = True  # a refusal for want of room uses nothing
    assert [may_grow() for _ in range(2)] == [True, False]
    now[0] += 1000.0
    assert [may_grow() for _ in range(6)] == [True] * 4 + [False] * 2


def test_sizes_that_no_option_says():
    gib = 1 << 30
    assert automatic_bytes(64 * gib, 40 * gib) == 16 * gib
    assert automatic_bytes(64 * gib, gib) == 4 * gib
    assert automatic_bytes(gib - 4, gib) == 0  # too little to be useful
    assert automatic_bytes(gib, gib) == gib // 4
    assert automatic_bytes(64 * gib, gib >> 5) == 0
    # In host memory: of what the cache leaves.
    assert automatic_bytes(64 * gib, 6 * gib, is_shared=True) == 10 * gib
    assert automatic_bytes(64 * gib, 16 * gib, is_shared=True) == 0
    assert automatic_bytes(64 * gib, 20 * gib, is_shared=True) == 0
    assert automatic_bytes(64 * gib, gib, is_shared=True, budget=3 * gib) == 2 * gib
    assert automatic_bytes(64 * gib, gib, is_shared=True, budget=gib) == 0


def test_files_survive_the_process_and_are_bounded(folder):
    size = filled(folder, [1]).used_bytes
    first = filled(folder, range(2, 9))
    assert len(first) == 8
    again = DiskTier(folder, 5 * size + 9, IDENTITY)
    assert len(again) <= 5
    assert again.used_bytes <= 5 * size + 9
    for number in range(20, 40):
        again.put(place(number), parts(number))
    again.flush()
    files = list(folder.glob("*.kv"))
    assert sum(path.stat().st_size for path in files) == again.used_bytes
    assert again.used_bytes <= 5 * size + 9
    assert number_of(again.get(place(39))) == 39


def test_files_are_read_to_memory_that_the_runner_allocates(folder):
    filled(folder, range(4)).close()
    made = []

    def empty(shape, dtype):
        made.append(np.zeros(shape, dtype))
        return made[-1]

    disk = DiskTier(folder, 1 << 24, IDENTITY, empty=empty)
    found = list(disk.get_all([place(number) for number in range(4)]))
    assert [number_of(each) for each in found] == [0, 1, 2, 3]
    cells = {id(each["cells"].data) for each in found}
    assert cells == set(map(id, made))


def test_a_block_that_is_used_stays(folder):
    size = filled(folder, [1]).used_bytes
    disk = filled(folder, [2, 3], capacity=3 * size + 9)
    assert number_of(disk.get(place(1))) == 1
    disk.put(place(4), parts(4))
    disk.flush()
    assert place(1) in disk
    assert place(2) not in disk


def test_a_flipped_bit_in_each_of_1000_records_is_found(folder, caplog):
    disk, random = filled(folder, range(1000)), Random(5)
    for path in folder.glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)
    assert [disk.get(place(number)) for number in range(1000)] == [None] * 1000
    assert disk.counts["damaged"] == 1000
    assert len(caplog.records) == 1
    assert "is damaged" in caplog.text
    assert list(folder.glob("*.kv")) == []
    assert disk.used_bytes == 0


@pytest.mark.parametrize(
    ("change", "kind", "what"),
    [
        ({"model": "other"}, "foreign", "another model"),
        ({"dtype": "bfloat16"}, "foreign", "another dtype"),
        (
            {"layouts": (LAYOUT._replace(dtype="float32"),) * 2},
            "foreign",
            "another layout",
        ),
    ],
)
def test_records_of_others_are_computed_again(folder, caplog, change, kind, what):
    filled(folder, [1])
    other = DiskTier(folder, 1 << 20, IDENTITY._replace(**change))
    assert place(1) in other
    assert other.get(place(1)) is None
    assert other.counts[kind] == 1
    assert what in caplog.text
    assert place(1) not in other


def test_a_record_under_another_name_is_foreign(folder):
    disk = filled(folder, [1, 3])
    (folder / name_of(place(3))).replace(folder / name_of(place(1)))
    assert disk.get(place(1)) is None
    assert disk.counts["foreign"] == 1


def test_records_from_before_a_reset_are_stale(folder):
    disk = filled(folder, [1])
    kept = (folder / name_of(place(1))).read_bytes()
    disk.clear()
    assert len(disk) == 0
    (folder / name_of(place(1))).write_bytes(kept)
    again = DiskTier(folder, 1 << 20, IDENTITY)
    assert again.get(place(1)) is None
    assert again.counts["stale"] == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_said_once(
    folder, monkeypatch, caplog, number
):
    disk = filled(folder, [1])

    def full(name, pieces, *, replace=True):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk._folder, "write", full)
    for each in range(2, 9):
        disk.put(place(each), parts(each))
        disk.flush()
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text
    assert number_of(disk.get(place(1))) == 1
    assert disk.get(place(5)) is None


def test_a_write_that_fails_in_any_way_leaves_nobody_waiting(
    folder, monkeypatch, caplog
):
    disk = filled(folder, [1])

    def fail(name, pieces):
        raise MemoryError("planted")

    monkeypatch.setattr(disk._folder, "write", fail)
    monkeypatch.setattr(disk_tier, "MAX_QUEUED_BYTES", BYTES)
    for each in range(2, 9):
        disk.put(place(each), parts(each), waits=True)
    disk.flush()
    assert "planted" in caplog.text
    assert disk._writer.is_alive()
    assert number_of(disk.get(place(1))) == 1


WRITER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_tiers import IDENTITY, DiskTier, parts, place
disk = DiskTier(Path({folder!r}), 1 << 30, IDENTITY)
print("begun", flush=True)
number = {first}
while True:
    disk.put(place(number), parts(number))
    disk.flush()
    number += 1
"""


def test_a_process_that_is_killed_leaves_whole_records_only(folder, depth):
    here, checked = str(Path(__file__).parent), 0
    for turn in range(depth(3, 12)):
        code = WRITER.format(
            path=[here, *sys.path], folder=str(folder), first=100_000 * turn
        )
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"begun\n"
        wanted = checked + turn + 2
        until(lambda wanted=wanted: len(list(folder.glob("*.kv"))) >= wanted)
        time.sleep(turn / 1000)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        disk = DiskTier(folder, 1 << 30, IDENTITY)
        numbers = [int.from_bytes(bytes.fromhex(path.name[:64]), "little")
                   for path in folder.glob("*.kv")]  # fmt: skip
        for number in numbers:
            assert number_of(disk.get(place(number))) == number
        assert disk.counts.total() == 0
        checked = len(numbers)


def test_a_link_or_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(RequestError, match=f"kv_disk {tmp_path / name}"):
            DiskTier(tmp_path / name, 1 << 20, IDENTITY)


def test_blocks_without_room_in_memory_go_to_files(folder):
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    tiers = BlockTiers(Costs(), host_bytes=2 * BYTES, disk=disk)
    for number in range(4):
        tiers.store(*place(number), parts(number))
    disk.flush()
    assert [place(number) in tiers.host for number in range(4)] == [False, False, True,
                                                                  True]  # fmt: skip
    assert all(tiers.holds(*place(number)) for number in range(4))
    assert tiers.fetch([place(0)])
    assert number_of(tiers.take(*place(0))) == 0
    assert tiers.fetch([place(3)])
    tiers.take(*place(3))
    assert tiers.hits == {"disk": 1, "host": 1}
    assert not tiers.fetch([place(9)])
    tiers.clear()
    assert not any(tiers.holds(*place(number)) for number in range(4))


def test_all_blocks_in_memory_are_written_at_the_end(folder, monkeypatch):
    monkeypatch.setattr(disk_tier, "MAX_QUEUED_BYTES", 3 * BYTES)
    disk = DiskTier(folder, 1 << 20, IDENTITY)
    tiers = BlockTiers(Costs(), host_bytes=100 * BYTES, disk=disk)
    for number in range(60):
        tiers.store(*place(number), parts(number))
    tiers.flush()
    assert disk.counts["written"] == 60


def test_loading_pays_while_it_is_faster_than_computing():
    costs = Costs()
    ten = {"host": 10}
    assert costs.pays(ten, 160)
    costs.computed(100, 1.0)  # 0.16 seconds a block
    assert costs.pays(ten, 160)
    costs.loaded("host", 10, 1.0)
    assert costs.pays(ten, 160)
    for _ in range(20):
        costs.loaded("host", 10, 3.0)
    refusals = 0
    while not costs.pays(ten, 160):
        refusals += 1
    assert 20 < refusals < 100  # it is tried again, much later


def test_a_slow_disk_does_not_stop_hits_in_memory():
    costs = Costs()
    costs.computed(100, 1.0)
    costs.loaded("host", 10, 0.1)
    costs.loaded("disk", 10, 5.0)
    assert costs.pays({"host": 10}, 160)
    assert not costs.pays({"disk": 10}, 160)
    # Few slow blocks are worth it where they lead to many fast ones.
    assert costs.pays({"host": 9, "disk": 1}, 160)
    # Blocks of one position in several groups are computed together.
    assert costs.pays({"host": 20}, 160)
    assert not costs.pays({"host": 200}, 160)


def test_costs_are_those_of_the_tier_that_was_read(folder):
    disk = filled(folder, range(4, 8))
    tiers = BlockTiers(Costs(), host_bytes=8 * BYTES, disk=disk)
    for number in range(4):
        tiers.store(*place(number), parts(number))
    places = [place(number) for number in range(8)]
    assert tiers.fetch(places)
    assert [number_of(tiers.take(*each)) for each in places] == list(range(8))
    tiers.loaded(8.0)
    host, slow = (tiers.costs._block_seconds[name] for name in ("host", "disk"))
    assert host == 1.0
    assert slow > 1.0


@pytest.mark.parametrize(
    ("field", "value", "bytes_"),
    [
        ("kv_host", "8GiB", 8 << 30),
        ("kv_host", "500 MB", 500_000_000),
        ("kv_host", "1.5kib", 1536),
        ("kv_host", "4096", 4096),
        ("kv_host", "0", 0),
        ("kv_host", None, 0),
    ],
)
def test_sizes(field, value, bytes_):
    assert EngineConfig(**{field: value}).host_bytes == bytes_


def test_the_disk_has_a_size_and_a_folder():
    assert EngineConfig(kv_disk="1GiB:/a:b").disk_tier == (1 << 30, "/a:b")
    assert EngineConfig().disk_tier is None


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_host": "8 apples"},
        {"kv_host": "-1"},
        {"kv_host": ""},
        {"kv_disk": "1GiB"},
        {"kv_disk": "1GiB:"},
        {"kv_disk": "0:/folder"},
        {"kv_disk": "/folder"},
    ],
)
def test_bad_sizes_are_refused(fields):
    with pytest.raises(RequestError, match=r"EngineConfig.kv_(host|disk): found"):
        EngineConfig(**fields)
