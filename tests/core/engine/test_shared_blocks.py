"""Engines share blocks in a store of a plugin; what is wrong there is computed."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import ClassVar

import pytest

from inl.engine import shared_blocks
from inl.engine.shared_blocks import SharedBlocks
from inl.errors import DeviceError, RequestError
from inl.kv_tiers import record
from inl.kv_tiers.store import Store
from inl.plugin import load_registry
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from waiting import until

LIMITS = Limits(
    slots=5, blocks=(145,), block_size=4, max_blocks_per_seq=24, vocab=256, depth=2,
    sampler="sample_filtered", token_budget=16,
)  # fmt: skip
PROMPT = list(range(100, 160))
OTHER = list(range(160, 100, -1))
OPTIONS = {"max_tokens": 6, "temperature": 0.9, "seed": 5}
PLUGIN = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_stores(register):
    register("local", "fake_stores:Local")
    register("unopened", "fake_stores:unopened")
    register("odd", "fake_stores:odd")
"""


class Local(Store):
    """Values of this process, by address."""

    values: ClassVar[dict[str, dict[str, bytes]]] = {}
    room = 1 << 20

    def __init__(self, address):
        self.held = self.values.setdefault(address, {})

    def get(self, names):
        return [self.held.get(name) for name in names]

    def put(self, name, pieces, *, replaces=False, is_pinned=False):
        if len(self.held) >= self.room:
            return False
        data = b"".join(pieces)
        self.held[name] = data if replaces else self.held.get(name, data)
        return True


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    from inl import plugin as plugins

    module = ModuleType("fake_stores")
    exec(PLUGIN, module.__dict__)
    module.Local, module.odd = Local, str
    module.unopened = lambda _: 1 / 0
    monkeypatch.setitem(sys.modules, "fake_stores", module)
    found = load_registry([], ["fake_stores"])
    monkeypatch.setattr(plugins, "registry", lambda: found)
    monkeypatch.setattr(shared_blocks, "LEAST_TOKENS", 8)
    monkeypatch.setattr(shared_blocks, "SECONDS", 300.0)
    monkeypatch.setattr(Local, "values", {})
    monkeypatch.setattr(Local, "room", 1 << 20)


@pytest.fixture
def made(engines):
    """Makes engines with an address of the store, or without one."""

    def make(address="a", **settings):
        if address:
            settings |= {"kv_store": f"local:{address}", "kv_host": "1MiB"}
        else:
            settings = {"prefix_cache": False} | settings
        return engines(runner=HashRunner(LIMITS), **settings)

    return make


def written(engine, count=14):
    """Wait until an engine has written so many blocks."""
    until(lambda: engine.shared_blocks.counts["written"] >= count)


@pytest.fixture
def stored(made):
    """An engine that has written the blocks of a prompt, and the answer without it."""
    engine = made()
    engine.generate(PROMPT, **OPTIONS)
    written(engine)
    return engine, made(address=None).generate(PROMPT, **OPTIONS).token_ids


def records():
    return {n: v for n, v in Local.values["a"].items() if "generation" not in n}


def test_another_engine_reads_what_one_has_written(made, stored):
    _, wanted = stored
    near = made()
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == wanted
    assert found.cached_tokens == 56
    assert near.shared_blocks.counts["read"] >= 14
    # What it has read is not written again, and is in its own cache now.
    assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
    handle = near.start([*PROMPT, 7, 8, 9], listener=None, **OPTIONS)
    assert handle.result().token_ids
    until(lambda: handle not in near.shared_blocks._handles)
    assert near.shared_blocks.counts["read"] <= 16


def test_tenants_and_other_stores_have_nothing_of_it(made, stored):
    _, wanted = stored
    for address, salt in (("a", "them"), ("b", "")):
        near = made(address)
        found = near.generate(PROMPT, cache_salt=salt, **OPTIONS)
        assert found.token_ids == wanted
        assert not near.shared_blocks.counts["read"]


def flipped(values):
    for name, value in values.items():
        values[name] = value[:-9] + bytes([value[-9] ^ 1]) + value[-8:]


def cut(values):
    for name, value in values.items():
        values[name] = value[: len(value) // 2]


def mixed_up(values):
    """Records that are right, under the names of others."""
    names = list(values)
    values.update(zip(names, [values[name] for name in reversed(names)], strict=True))


@pytest.mark.parametrize(
    ("change", "kind"),
    [(flipped, "damaged"), (cut, "damaged"), (mixed_up, "foreign")],
)
def test_wrong_records_are_computed(made, stored, change, kind):
    _, wanted = stored
    values = records()
    change(values)
    Local.values["a"].update(values)
    near = made()
    assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
    assert near.shared_blocks.counts[kind] == 1
    assert not near.shared_blocks.counts["read"]


def test_a_fault_in_the_check_is_found(made, stored, monkeypatch):
    """Without the comparison of what records say of themselves, tokens are wrong."""
    _, wanted = stored
    values = records()
    mixed_up(values)
    Local.values["a"].update(values)

    def believed(secret, own, data):
        start = record.SIGNATURE + record.LENGTH.size
        said = record.LENGTH.unpack_from(data, record.SIGNATURE)[0]
        return record.decoded(secret, data[start : start + said], data)

    monkeypatch.setattr(shared_blocks, "decoded", believed)
    assert made().generate(PROMPT, **OPTIONS).token_ids != wanted


def test_a_reset_makes_the_records_of_all_engines_stale(made, stored):
    far, wanted = stored
    near = made()
    far.reset_prefix_cache()
    assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
    assert near.shared_blocks.counts["stale"] == 1
    assert not near.shared_blocks.counts["read"]


def test_a_store_that_has_lost_all_is_filled_again(made, stored):
    far, wanted = stored
    Local.values["a"].clear()
    near = made()
    assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
    written(near)
    assert made().generate(PROMPT, **OPTIONS).cached_tokens == 56
    far.close()


def test_a_full_store_is_counted(made, monkeypatch):
    monkeypatch.setattr(Local, "room", 5)
    engine, alone = made(), made(address=None)
    wanted = alone.generate(PROMPT, **OPTIONS).token_ids
    assert engine.generate(PROMPT, **OPTIONS).token_ids == wanted
    until(lambda: engine.shared_blocks.counts["full"])
    near = made()
    assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
    assert near.shared_blocks.counts["read"] == 4


@pytest.mark.parametrize("error", [ConnectionResetError, ZeroDivisionError])
def test_a_store_that_fails_is_left_for_a_while(made, stored, monkeypatch, error):
    _, wanted = stored

    def failing(self, names):
        raise error("planted")

    monkeypatch.setattr(Local, "get", failing)
    near = made()
    assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
    assert near.shared_blocks.counts["failed"] >= 1
    assert not near.shared_blocks.counts["read"]


def test_a_store_that_does_not_answer_is_not_waited_for(made, stored, monkeypatch):
    _, wanted = stored
    ends = threading.Event()
    get = Local.get

    def hanging(self, names):
        assert ends.wait(300)
        return get(self, names)

    monkeypatch.setattr(shared_blocks, "SECONDS", 0.05)
    monkeypatch.setattr(Local, "get", hanging)
    near = made()
    try:
        assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
        assert near.shared_blocks.counts["expired"] == 1
        assert near.generate(OTHER, **OPTIONS).token_ids
        assert near.shared_blocks.counts["expired"] == 1
    finally:
        ends.set()


def test_stores_that_cannot_be_opened_are_refused(made):
    with pytest.raises(RequestError, match=r"kv_store: found 'other:x', accept.*local"):
        made(kv_store="other:x", address=None)
    for name, text in (("unopened", "ZeroDivisionError"), ("odd", "found str")):
        with pytest.raises(DeviceError, match=text):
            made(None, kv_store=f"{name}:x", kv_host="1MiB", prefix_cache=True)
    with pytest.raises(RequestError, match="kv_host"):
        made(None, kv_store="local:x")


def test_requests_that_wait_to_be_written_are_bounded(made, monkeypatch):
    monkeypatch.setattr(shared_blocks, "MOST_WAITING", 2)
    monkeypatch.setattr(SharedBlocks, "_write_finished", lambda self: None)
    engine = made()
    for first in range(4):
        engine.generate([first, *PROMPT], **OPTIONS)
    assert engine.shared_blocks.counts["dropped"] == 2
