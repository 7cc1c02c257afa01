"""Engines share blocks in Mooncake Store over TCP; what it loses is computed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inl.errors import DeviceError
from inl_mooncake.store import MooncakeStore
from tiny_engines import engines as engines
from tiny_engines import tiny_made as tiny_made
from waiting import until

SMALL = "segment=32MiB&buffer=16MiB"
OPTIONS = {"max_tokens": 6, "temperature": 0}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def prompt(seed, length=300):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def master():
    """The master of a store; its ``port`` is where it listens."""
    import mooncake

    port, path = free_port(), Path(mooncake.__path__[0]) / "mooncake_master"
    process = subprocess.Popen(
        [str(path), f"--rpc_port={port}", f"--metrics_port={free_port()}",
         "--default_kv_lease_ttl=100", "--rpc_address=127.0.0.1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    process.port = port
    until(lambda: answers(port))
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@pytest.fixture
def near(engines, master):
    """An engine of this process, and its answer without a store."""
    address = f"mooncake:127.0.0.1:{master.port}?{SMALL}"
    engine = engines(context=512, kv_host="16MiB", kv_store=address)
    alone = engines(context=512, prefix_cache=False)
    return engine, lambda ids: list(alone.generate(ids, **OPTIONS).token_ids)


class Second:
    """The engine of another process."""

    def __init__(self, port):
        script = Path(__file__).with_name("second_engine.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), f"127.0.0.1:{port}?{SMALL}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while self.process.stdout.readline() != "ready\n":  # Mooncake writes there too
            assert self.process.poll() is None

    def ask(self, ids):
        self.process.stdin.write(json.dumps(ids) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("answer "):
            assert self.process.poll() is None
        return json.loads(line.removeprefix("answer "))


@pytest.fixture
def second(master):
    made = Second(master.port)
    yield made
    made.process.kill()
    made.process.communicate()


def written(engine, count):
    until(lambda: engine.shared_blocks.counts["written"] >= count)


def test_an_engine_of_another_process_reads_what_one_has_written(near, second):
    engine, alone = near
    for seed in range(3):
        ids, before = prompt(seed), engine.shared_blocks.counts["written"]
        wanted = alone(ids)
        assert list(engine.generate(ids, **OPTIONS).token_ids) == wanted
        written(engine, before + 18)
        found, cached, counts = second.ask(ids)
        assert found == wanted
        assert cached == 288
        assert counts["read"] == 18 * (seed + 1)
    # A process that is killed takes its part of the store with it, and no other.
    second.process.kill()
    other = prompt(9)
    assert list(engine.generate(other, **OPTIONS).token_ids) == alone(other)
    assert not engine.shared_blocks.counts["damaged"]


def test_damaged_records_are_computed(near, second, master):
    engine, alone = near
    ids = prompt(20)
    engine.generate(ids, **OPTIONS)
    written(engine, 18)
    store = engine.shared_blocks._store
    names = [name for name in engine.shared_blocks._known if "generation" not in name]
    for name in names:
        (value,) = store.get([name])
        wrong = bytearray(value)
        wrong[-5] ^= 4
        assert store.put(name, [wrong], replaces=True)
    found, _, counts = second.ask(ids)
    assert found == alone(ids)
    assert counts["damaged"] == 1
    assert not counts.get("read")


def test_a_reset_makes_records_of_all_stale(near, second):
    engine, alone = near
    ids = prompt(30)
    engine.generate(ids, **OPTIONS)
    written(engine, 18)
    engine.reset_prefix_cache()
    found, _, counts = second.ask(ids)
    assert found == alone(ids)
    assert counts.get("stale") == 1
    assert not counts.get("read")


def test_a_full_store_drops_records_and_not_the_generation(near):
    engine, _ = near
    shared = engine.shared_blocks
    generation = shared._generation()
    value = bytes(1 << 20)
    for number in range(100):  # three times its memory
        shared._store.put(f"filler.{number}", [value])
    assert shared._generation() == generation
    held = shared._store.get([f"filler.{number}" for number in range(0, 100, 10)])
    assert None in held


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_master_that_dies_or_hangs_is_not_waited_for(near, master, how, monkeypatch):
    from inl.engine import shared_blocks

    engine, alone = near
    first, second = prompt(40), prompt(41)
    engine.generate(first, **OPTIONS)
    written(engine, 18)
    monkeypatch.setattr(shared_blocks, "SECONDS", 2.0)
    master.send_signal(how)
    assert list(engine.generate(second, **OPTIONS).token_ids) == alone(second)
    counts = engine.shared_blocks.counts
    until(lambda: counts["failed"] + counts["expired"] > 0)
    assert counts["damaged"] == counts["foreign"] == 0


def test_what_cannot_be_opened_is_refused():
    with pytest.raises(DeviceError, match="found no master at"):
        MooncakeStore(f"127.0.0.1:{free_port()}")
    with pytest.raises(DeviceError, match="found options colour, accepts segment"):
        MooncakeStore("127.0.0.1:1?colour=red")
    with pytest.raises(DeviceError, match="segment: found 'much', accepts a size"):
        MooncakeStore("127.0.0.1:1?segment=much")
