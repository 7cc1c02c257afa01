"""Contents of caches by NIXL: between processes, and between engines."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from inl.engine import remote_prefill, scheduler_setup
from inl.errors import DeviceError
from inl.kv_transfer import transport
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from inl_nixl.transport import NixlTransport
from tiny_engines import engines as engines
from tiny_engines import tiny_made as tiny_made

LIMITS = Limits(
    slots=5, blocks=(145,), block_size=4, max_blocks_per_seq=24, vocab=256, depth=2,
    sampler="sample_filtered", token_budget=16,
)  # fmt: skip
PROMPT = list(range(100, 160))
OPTIONS = {"max_tokens": 6, "temperature": 0.9, "seed": 5}


def drawn(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.uint8)


def writer(pipe):
    """Writes drawn bytes to the targets that it receives, until there is none."""
    opened = NixlTransport()
    while (asked := pipe.recv()) is not None:
        target, seed, count = asked
        memory = drawn(seed, count)
        opened.register(memory)
        try:
            opened.write(memory, target, 60.0)
            pipe.send("")
        except Exception as error:
            pipe.send(repr(error))
        opened.release(memory)


@pytest.fixture
def other():
    """A process that writes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=writer, args=(there,), daemon=True)
    process.start()
    yield here
    here.send(None)
    process.join(60)
    process.kill()


@pytest.mark.parametrize("tls", ["", "tcp"])
def test_another_process_writes_here(monkeypatch, request, tls):
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    other = request.getfixturevalue("other")
    opened = NixlTransport()
    for seed, count in enumerate((1, 1000, 1 << 20, 32 << 20, 77)):
        memory = np.zeros(max(count, 4096), np.uint8)
        target = opened.register(memory)
        other.send((target, seed, count))
        assert other.poll(120)
        assert other.recv() == ""
        assert np.array_equal(memory[:count], drawn(seed, count))
        assert not memory[count:].any()
        opened.release(memory)


def test_more_bytes_than_there_are_are_refused():
    opened = NixlTransport()
    memory, more = np.zeros(100, np.uint8), np.zeros(101, np.uint8)
    target = opened.register(memory)
    opened.register(more)
    with pytest.raises(DeviceError, match="found 101 bytes, accepts 100"):
        opened.write(more, target, 5.0)


@pytest.fixture
def pair(engines, monkeypatch):
    """Makes engines whose models have state that every token changes, or have none."""
    monkeypatch.setattr(transport, "open_transport", lambda _: NixlTransport())
    monkeypatch.setattr(remote_prefill, "LEAST_TOKENS", 8)

    def make(has_state):
        monkeypatch.setattr(scheduler_setup, "is_recurrent", lambda _: has_state)

        def made(**settings):
            runner = HashRunner(LIMITS, recurrent=has_state)
            return engines(runner=runner, **settings)

        far = made(role="prefill", kv_peer="127.0.0.1:0", kv_transport="nixl")
        near = made(
            role="decode", kv_peer=far.prefill_port.address, kv_host="1MiB",
            kv_transport="nixl",
        )  # fmt: skip
        return near, made(prefix_cache=False)

    return make


@pytest.mark.parametrize("has_state", [False, True])
def test_prompts_are_computed_elsewhere(pair, monkeypatch, has_state):
    written = []
    write = NixlTransport.write

    def counted(self, memory, target, seconds):
        write(self, memory, target, seconds)
        written.append(len(memory))

    monkeypatch.setattr(NixlTransport, "write", counted)
    near, alone = pair(has_state)
    prompts = [[each, *PROMPT[each:], *PROMPT[:each]] for each in range(8)]
    handles = [near.start(each, listener=None, **OPTIONS) for each in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        wanted = alone.generate(prompt, **OPTIONS)
        assert handle.result().token_ids == wanted.token_ids
    assert near.remote_prefill.counts["done"] == len(prompts)
    assert sum(written) > 56 * 8 * len(prompts)


def test_another_write_is_found(pair, monkeypatch):
    write = NixlTransport.write

    def wrong(self, memory, target, seconds):
        memory[len(memory) // 2] ^= 1
        write(self, memory, target, seconds)

    monkeypatch.setattr(NixlTransport, "write", wrong)
    near, alone = pair(has_state=False)
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["damaged"] == 1
