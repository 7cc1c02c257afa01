"""Random requests over tiers that lose, damage and mix up blocks: texts are right."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from inl.cache_dir.private_folder import PrivateFolder
from inl.engine import block_copies
from inl.engine.core import EngineCore
from inl.kv_tiers import disk_tier, record
from inl.kv_tiers.disk_tier import DiskTier
from inl.kv_tiers.record import Identity
from inl.kv_tiers.tiers import BlockTiers, Costs
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.testing.hash_cells import HashCells
from inl.testing.hash_runner import HashRunner

SMALL = Limits(5, (17,), 4, 8, 100, depth=2)
WINDOWED = Limits(5, (19, 15), 4, 8, 100, depth=2, windows=(None, 9))
TENANTS = ("", "one", "two")
EVENTS = ("flip", "cut", "remove", "restart", "kill", "forget", "restore", "fail")
PLANTED = "planted: a step failed"


class Cells(HashCells):
    """Cells of a model with other weights: each version has other contents."""

    version = 0

    def write(self, tables, start, ids, adapter):
        super().write(tables, start, ids, adapter + 1000 * self.version)


class Failing(HashRunner):
    """A runner one of whose calls fails once."""

    fails = ""

    def _call(self, name, *args):
        if self.fails == name:
            self.fails = ""
            raise RuntimeError(PLANTED)
        return getattr(super(), name)(*args)

    def submit(self, message):
        self._call("submit", message)

    def read(self):
        return self._call("read")

    def write(self, message, parts):
        self._call("write", message, parts)

    def collect(self):
        return self._call("collect")


def runner_of(limits, version, lag=None):
    runner = Failing(limits, lag=lag)
    runner.cells = Cells(limits)
    runner.cells.version = version
    return runner


class AlwaysPays(Costs):
    """Loads whenever it can: what a clock says must not decide a test."""

    def pays(self, blocks, tokens):
        return True


class World:
    """An engine with tiers that is restarted, and files that are damaged."""

    def __init__(self, folder, seed, *, limits=SMALL):
        self.random, self.folder, self.limits = Random(seed), folder, limits
        self.counts = Counter()
        self.version = self.dtype = 0
        self.weights = {}
        self.open = {}
        self.asked = Counter()
        """Requests with each first block of each tenant."""
        self.start()

    def start(self):
        """Start another process: in the same or another dtype."""
        self.dtype = self.random.randrange(2)
        version = self.version * 2 + self.dtype
        runner = runner_of(self.limits, version, self.random)
        identity = Identity("model", f"dtype {self.dtype}", runner.cache_layout.groups)
        disk = DiskTier(self.folder, self.random.choice([9_000, 1 << 20]), identity)
        size = self.random.choice([0, 2_000, 1 << 20])
        self.tiers = BlockTiers(AlwaysPays(), host_bytes=size, disk=disk)
        self.core = EngineCore(
            runner, SchedulerConfig(token_budget=16, model_digest="model"),
            tiers=self.tiers,
        )  # fmt: skip
        self.asked_as = {}
        """First block, tenant, and preemptions before it, of each request by id."""

    def expected(self, request):
        """Compute a request alone, without a prefix cache."""
        runner = runner_of(self.limits, self.version * 2 + self.dtype)
        core = EngineCore(runner, SchedulerConfig(prefix_cache=False))
        alone = Request(list(request.tokens[: request.prompt_tokens]), max_tokens=4)
        core.add(alone)
        while core.has_work:
            core.step()
        return alone.output_ids

    def add(self):
        draw = self.random
        family = draw.randrange(9)
        length = draw.randint(5, 22)
        prompt = [family * 10 + at % 7 for at in range(length)]
        salt = draw.choice(TENANTS)
        request = Request(prompt, max_tokens=4, cache_salt=salt)
        number = self.core.add(request)
        self.open[number] = request
        first = tuple(prompt[:4]), salt
        self.asked_as[number] = first, self.core.scheduler.preemptions
        self.asked[first] += 1

    def step(self):
        self.tiers.disk.flush()  # when the thread runs must not decide a test
        for event in self.core.step():
            if event.error is not None:
                assert str(event.error) == PLANTED, event.error
                self.open.pop(event.request)
                self.counts["failed requests"] += 1
            if event.finish_reason == "length":
                self.finish(self.open.pop(event.request))

    def finish(self, request):
        text = request.output_ids
        assert text == self.expected(request), "a text is wrong"
        self.counts["requests"] += 1
        self.counts["cached"] += request.cached_tokens
        first, preemptions = self.asked_as.pop(request.id)
        if self.asked[first] == 1 and self.core.scheduler.preemptions == preemptions:
            assert not request.cached_tokens, "another tenant's block"

    def disturb(self):
        """Damage, remove or bring back files; restart; forget everything."""
        draw = self.random
        self.tiers.disk.flush()
        paths = sorted(self.folder.glob("*.kv"))
        event = draw.choice(EVENTS)
        self.counts[event] += 1
        if event in ("flip", "cut", "remove") and paths:
            path = draw.choice(paths)
            data = bytearray(path.read_bytes())
            if event == "flip":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                path.write_bytes(data)
            elif event == "cut":
                path.write_bytes(data[: draw.randrange(len(data))])
            else:
                path.unlink()
        elif event == "fail":
            self.core.runner.fails = draw.choice(["submit", "read", "write", "collect"])
        elif event in ("restart", "kill"):
            while self.core.has_work:
                self.step()
            if event == "restart":
                self.core.flush_tiers()
            self.restart()
        elif event == "forget":
            while self.core.has_work:
                self.step()
            self.tiers.flush()
            kept = {path: path.read_bytes() for path in self.folder.glob("*.kv")}
            self.core.reset_prefix_cache()
            self.weights = kept
            # As with other weights under the same name.
            self.version += 1
            self.core.runner.cells.version = self.version * 2 + self.dtype
            self.asked.clear()
        elif event == "restore":
            for path, data in self.weights.items():
                path.write_bytes(data)
                path.chmod(0o600)
            self.weights = {}
            while self.core.has_work:
                self.step()
            self.restart()

    def restart(self):
        self.count()
        self.tiers.close()
        self.start()

    def count(self):
        for name, value in self.tiers.disk.counts.items():
            self.counts[name] += value
        for name, value in self.tiers.hits.items():
            self.counts[f"{name} hits"] += value


def soak(folder, seed, steps, limits=SMALL):
    world = World(folder, seed, limits=limits)
    for number in range(steps):
        if world.random.random() < 0.5 and len(world.open) < 6:
            world.add()
        if number % 20 == 19:
            world.disturb()
        world.step()
    while world.core.has_work:
        world.step()
    world.count()
    world.tiers.close()
    return world.counts


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("limits", [SMALL, WINDOWED], ids=["one group", "windows"])
def test_every_text_is_right(limits, tmp_path, depth, report):
    counts = soak(tmp_path / "kv", 3, depth(2_500, 5_000, 100_000), limits)
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for name in ("host hits", "disk hits", "damaged", "foreign", "stale", "cached"):
        assert counts[name], name


def any_generation(identity, group, key, generation):
    return record.head(identity, group, key, 0)


def any_dtype(identity, group, key, generation):
    return record.head(identity._replace(dtype=""), group, key, generation)


def next_blocks(kind, group, ids):
    from inl.spec.message import WRITE, transfer_frame

    last = (18, 14)[group] if group else 16
    moved = [block % last + 1 for block in ids] if kind == WRITE else ids
    return transfer_frame(kind, group, moved)


def any_tenant(**fields):
    from inl.kv.block_hash import root_hash

    return root_hash(**{**fields, "cache_salt": ""})


def any_key(place):
    return f"{place[1][:1].hex()}.{place[0]}.kv"


FAULTS = {
    "stale generation": [(disk_tier, "head", any_generation)],
    "dtype ignored": [(disk_tier, "head", any_dtype)],
    "next block": [(block_copies, "transfer_frame", next_blocks)],
    "another tenant": [("inl.kv.prefix_cache", "root_hash", any_tenant)],
    "another block": [
        (disk_tier, "name_of", any_key),
        (disk_tier, "head", lambda *_: b"{}"),
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path, monkeypatch):
    for module, name, wrong in FAULTS[fault]:
        where = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{where}.{name}", wrong)
    message = "another tenant's block" if fault == "another tenant" else "is wrong"
    with pytest.raises(AssertionError, match=message):
        soak(tmp_path / "kv", 3, 2_500)


def test_names_that_collide_are_found_by_the_record(tmp_path, monkeypatch):
    """What a record says of itself is checked, whatever its name."""
    monkeypatch.setattr(disk_tier, "name_of", any_key)
    assert soak(tmp_path / "kv", 3, 2_500)["foreign"] > 10


def test_the_folder_is_private(tmp_path):
    soak(tmp_path / "kv", 1, 60)
    with PrivateFolder(tmp_path / "kv") as folder:
        assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
        assert "key" in folder.names()
