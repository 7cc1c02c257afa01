"""Transports of plugins carry contents beside the link; what is wrong is computed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar

import pytest

from inl.engine import prefill_role, remote_prefill
from inl.errors import DeviceError, RequestError
from inl.kv_transfer import transport
from inl.kv_transfer.transport import Transport
from inl.plugin import load_registry
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner

LIMITS = Limits(
    slots=5, blocks=(145,), block_size=4, max_blocks_per_seq=24, vocab=256, depth=2,
    sampler="sample_filtered", token_budget=16,
)  # fmt: skip
PROMPT = list(range(100, 160))
OPTIONS = {"max_tokens": 6, "temperature": 0.9, "seed": 5}
PLUGIN = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_transports(register):
    register("local", "fake_transports:Local")
    register("unopened", "fake_transports:unopened")
    register("odd", "fake_transports:odd")
"""


class Local(Transport):
    """Copies memory of this process."""

    memory: ClassVar[dict[bytes, object]] = {}
    written: ClassVar[list[int]] = []

    def register(self, memory):
        name = str(id(memory)).encode()
        self.memory[name] = memory
        return name

    def release(self, memory):
        self.memory.pop(str(id(memory)).encode(), None)  # or the test is over

    def write(self, memory, target, seconds):
        assert seconds > 0
        self.memory[target][: len(memory)] = memory
        self.written.append(len(memory))


@pytest.fixture(autouse=True)
def plugin(monkeypatch, patient_links):
    from inl import plugin as plugins

    module = ModuleType("fake_transports")
    exec(PLUGIN, module.__dict__)
    module.Local, module.odd = Local, int
    module.unopened = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "fake_transports", module)
    found = load_registry([], ["fake_transports"])
    monkeypatch.setattr(plugins, "registry", lambda: found)
    monkeypatch.setattr(remote_prefill, "LEAST_TOKENS", 8)
    monkeypatch.setattr(remote_prefill, "SECONDS", 300.0)
    monkeypatch.setattr(Local, "memory", {})
    monkeypatch.setattr(Local, "written", [])
    return found


@pytest.fixture
def pair(engines, has_state):
    def make(there="local", here="local"):
        def runner():
            return HashRunner(LIMITS, recurrent=has_state)

        far = engines(
            runner=runner(), role="prefill", kv_peer="127.0.0.1:0", kv_transport=there
        )
        near = engines(
            runner=runner(), role="decode", kv_peer=far.prefill_port.address,
            kv_host="1MiB", kv_transport=here,
        )  # fmt: skip
        return far, near, engines(runner=runner(), prefix_cache=False)

    return make


def test_contents_come_beside_the_link(pair, has_state):
    far, near, alone = pair()
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert found.cached_tokens == (59 if has_state else 56)
    assert near.remote_prefill.counts["done"] == 1
    # 60 tokens of 8 bytes at least, without heads.
    assert sum(Local.written) > 59 * 8
    assert len(Local.memory) == 2  # one of each engine, for further tickets
    near.close()
    far.close()
    assert not Local.memory


def test_contents_longer_than_the_room_come_over_the_link(pair, monkeypatch):
    monkeypatch.setattr(prefill_role, "room_bytes", lambda _: 100)
    _, near, alone = pair()
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["done"] == 1
    assert max(Local.written, default=0) <= 100


def damages(self, memory, target, seconds):
    Local.memory[target][: len(memory)] = memory
    if len(memory) > 100:  # blocks
        Local.memory[target][len(memory) // 3] ^= 1


def forgets(self, memory, target, seconds):
    """Says that it has written what it has not."""


def dies(self, memory, target, seconds):
    raise ConnectionResetError("planted")


def breaks(self, memory, target, seconds):
    raise ZeroDivisionError("planted")


FAULTS = {"damages": "damaged", "forgets": "damaged", "dies": "failed",
          "breaks": "failed"}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_transport_that_fails_changes_no_token(pair, monkeypatch, name):
    monkeypatch.setattr(Local, "write", globals()[name])
    _, near, alone = pair()
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    counts = near.remote_prefill.counts
    assert (counts[FAULTS[name]], counts["done"]) == (1, 0)


def test_the_digest_finds_what_was_not_written(pair, monkeypatch):
    """Without it, contents of the ticket before would be used."""
    monkeypatch.setattr(transport.hmac, "compare_digest", lambda *_: True)
    monkeypatch.setattr(Local, "write", damages)
    _, near, alone = pair()
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids != alone.generate(PROMPT, **OPTIONS).token_ids


@pytest.mark.parametrize(("there", "here"), [("local", None), (None, "local")])
def test_both_engines_name_the_same_one(pair, there, here):
    _, near, alone = pair(there, here)
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["refused"] == 1


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("absent", RequestError, "found 'absent', accepted: None, or with a role that"),
        ("unopened", DeviceError, "unopened: cannot be opened: ZeroDivisionError"),
        ("odd", DeviceError, "transport odd: found int, accepted"),
    ],
)
def test_one_that_cannot_be_used_is_refused(engines, name, error, says):
    with pytest.raises(error, match=says):
        engines(
            runner=HashRunner(LIMITS), role="prefill", kv_peer="127.0.0.1:0",
            kv_transport=name,
        )  # fmt: skip
    with pytest.raises(RequestError, match="kv_transport"):
        engines(runner=HashRunner(LIMITS), kv_transport="local")


def test_many_tickets_have_memory_of_their_own(pair):
    _, near, alone = pair()
    prompts = [[each, *PROMPT[each:], *PROMPT[:each]] for each in range(12)]
    handles = [near.start(each, listener=None, **OPTIONS) for each in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        wanted = alone.generate(prompt, **OPTIONS)
        assert handle.result().token_ids == wanted.token_ids
    assert near.remote_prefill.counts["done"] == 12
