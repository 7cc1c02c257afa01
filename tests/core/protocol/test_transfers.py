"""READ and WRITE frames: the same rules and contents for every runner."""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import asdict

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.dtypes import HostArray, cast, wrap
from inl.errors import ProtocolError, RunnerError
from inl.models.llama import MODEL
from inl.protocol import wire_arrays, wire_json
from inl.protocol.runner import MAX_READS
from inl.runners.group_runner import RankRunner
from inl.runners.local_runner import LocalRunner
from inl.runners.worker_runner import WorkerRunner
from inl.spec.cache import Slotted
from inl.spec.cache_layout import (
    HEADS,
    SLOT_GROUP,
    BlockLayout,
    CacheLayout,
    divided,
    joined,
    stored_bits,
)
from inl.spec.message import MASKED, READ, WRITE, admit_frame, transfer_frame
from inl.testing.hash_runner import HashRunner
from inl.testing.play import one_step
from inl.testing.tiny import (
    MemoryCheckpoint,
    local_runner,
    reference_ranks,
    tiny_llama,
)

PROMPT = [5, 9, 2, 7, 30, 31, 32]
DEVICE = Device("reference:0")


def checkpoint():
    return MemoryCheckpoint(*tiny_llama(np.random.default_rng(3), kv_heads=4))


def local(limits):
    return local_runner(ReferenceBackend(DEVICE), MODEL, checkpoint(), limits)


def ranks(limits):
    return reference_ranks(DEVICE, MODEL, checkpoint(), limits, ranks=2)


def worker(limits):
    options = {"limits": asdict(limits)}
    return WorkerRunner(sys.executable, options, factory="worker_factories:hashes")


MAKERS = {
    HashRunner: HashRunner,
    LocalRunner: local,
    RankRunner: ranks,
    WorkerRunner: worker,
}


@pytest.fixture
def made(small, monkeypatch):
    """Make a runner of a kind; it is closed at the end."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    runners = []

    def make(kind):
        runner = MAKERS[kind](small(vocab=96, depth=2, blocks=(9,)))
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def admission(limits, blocks, **fields):
    width = limits.max_blocks_per_seq
    return admit_frame(1, [blocks], groups=1, max_blocks_per_seq=width, **fields)


def answer(runner, step, count):
    tokens = []
    for number in range(step, step + count):
        frame = one_step(runner.limits, [(1, [-1])], step=number, decoding=1)
        runner.submit(frame)
        tokens.append(int(runner.collect().tokens[0, 0]))
    return tokens


def prefilled(runner, blocks):
    runner.submit(admission(runner.limits, blocks))
    runner.submit(one_step(runner.limits, [(1, PROMPT)], step=1, decoding=0))
    return int(runner.collect().tokens[0, 0])


@pytest.mark.parametrize("source", MAKERS, ids=lambda kind: kind.__name__)
def test_a_sequence_goes_on_with_blocks_of_another_runner(made, source):
    """Between one rank and two as well: heads are an axis."""
    kinds = {LocalRunner: RankRunner, RankRunner: LocalRunner, HashRunner: WorkerRunner}
    one, other = made(source), made(kinds.get(source, HashRunner))
    assert one.cache_layout == other.cache_layout
    first = prefilled(one, [1, 2, 3])
    one.submit(transfer_frame(READ, 0, [1, 2]))
    other.write(transfer_frame(WRITE, 0, [7, 4]), one.read())
    at = {"length": len(PROMPT), "last": first}
    other.submit(admission(other.limits, [7, 4, 5], **at))
    expected = answer(one, 2, 4)
    assert answer(other, 1, 4) == expected
    # The other way round: blocks in another order are another sequence.
    other.submit(admission(other.limits, [4, 7, 5], **at))
    assert answer(other, 5, 4) != expected


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_blocks_are_read_and_written_one_by_one(made, kind):
    one, other = made(kind), made(kind)
    prefilled(one, [1, 2, 3])
    one.submit(transfer_frame(READ, 0, [1, 2]))
    blocks = one.read_blocks(2)
    assert not any(
        np.shares_memory(stored_bits(blocks[0][name]), stored_bits(blocks[1][name]))
        for name in blocks[0]
    )
    other.write_blocks(transfer_frame(WRITE, 0, [7, 4]), blocks)
    one.submit(transfer_frame(READ, 0, [1, 2]))
    other.submit(transfer_frame(READ, 0, [7, 4]))
    wanted, found = one.read(), other.read()
    assert wanted["cells"].data.any()
    assert np.array_equal(stored_bits(found["cells"]), stored_bits(wanted["cells"]))
    with pytest.raises(ProtocolError, match="contents of"):
        other.write_blocks(transfer_frame(WRITE, 0, [7, 4, 3]), blocks)
    with pytest.raises(ProtocolError, match="no READ frame waits"):
        one.read_blocks(1)


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_contents_are_those_at_the_place_of_the_frame(made, kind):
    """Steps that follow a READ do not change what it returns."""
    runner = made(kind)
    prefilled(runner, [1, 2, 3])
    runner.submit(transfer_frame(READ, 0, [2]))
    before = runner.read()
    runner.submit(transfer_frame(READ, 0, [2]))
    runner.submit(one_step(runner.limits, [(1, [-1])], step=2, decoding=1))
    runner.submit(transfer_frame(READ, 0, [2]))
    runner.collect()
    same, after = runner.read(), runner.read()
    assert np.array_equal(same["cells"].data, before["cells"].data)
    assert not np.array_equal(after["cells"].data, before["cells"].data)
    with pytest.raises(ProtocolError, match="no READ frame waits"):
        runner.read()


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_calls_out_of_turn_are_refused(made, kind):
    runner = made(kind)
    frame = transfer_frame(WRITE, 0, [1])
    with pytest.raises(ProtocolError, match="call write with its contents"):
        runner.submit(frame)
    runner.submit(transfer_frame(READ, 0, [1]))
    parts = runner.read()
    with pytest.raises(ProtocolError, match="needs a WRITE frame"):
        runner.write(transfer_frame(READ, 0, [1]), parts)
    with pytest.raises(ProtocolError, match=r"contents of blocks of group 0: found"):
        runner.write(transfer_frame(WRITE, 0, [1, 2]), parts)
    half = {"cells": cast(np.zeros(parts["cells"].shape), "float16")}
    with pytest.raises(ProtocolError, match="float16"):
        runner.write(frame, half)
    for _ in range(MAX_READS):
        runner.submit(transfer_frame(READ, 0, [1]))
    with pytest.raises(ProtocolError, match="call read first"):
        runner.submit(transfer_frame(READ, 0, [1]))
    runner.reset()
    with pytest.raises(ProtocolError, match="no READ frame waits"):
        runner.read()
    runner.submit(admission(runner.limits, [1, 2]))
    step = one_step(runner.limits, [(1, PROMPT)], step=1, decoding=0, flags=MASKED)
    runner.submit(step)
    with pytest.raises(ProtocolError, match="waits for its masks"):
        runner.write(frame, parts)


@pytest.mark.parametrize(
    ("group", "ids", "words"),
    [
        (0, [9], "block: found 9, accepts 1 to 8"),
        (0, [0], "block: found 0, accepts 1 to 8"),
        (0, [3, 3], "accepts each of them once"),
        (1, [3], "group: found 1, accepts -1 to 0"),
        (SLOT_GROUP, [1, 2], "number of blocks: found 2, accepts 1 to 1"),
        (SLOT_GROUP, [99], "slot: found 99"),
    ],
)
def test_bad_frames_are_refused(made, group, ids, words):
    runner = made(HashRunner)
    with pytest.raises(ProtocolError, match=words):
        runner.submit(transfer_frame(READ, group, ids))


def test_a_worker_of_an_older_core_is_sent_no_frames(made, monkeypatch):
    def without(payload, where):
        return {**wire_json.read_text(payload, where), "features": []}

    monkeypatch.setattr("inl.runners.worker_runner.wire_json.check_hello", without)
    runner = made(WorkerRunner)
    assert runner.cache_layout is None
    with pytest.raises(RunnerError, match="copies no contents of its cache"):
        runner.submit(transfer_frame(READ, 0, [1]))
    runner.submit(admission(runner.limits, [1, 2]))
    runner.submit(one_step(runner.limits, [(1, PROMPT)], step=1, decoding=0))
    assert runner.collect().step == 1


def contents():
    rng = np.random.default_rng(0)
    return {
        "cells": wrap(rng.integers(-9, 9, (2, 2, 3, 4, 2, 8), np.int8)),
        "scales": wrap(rng.standard_normal((2, 2, 3, 4, 2)).astype(np.float32)),
        "half": cast(rng.standard_normal((3,)), "bfloat16"),
        "bits": HostArray(np.arange(4, dtype=np.uint8), "float8_e4m3", (2, 2)),
    }


def test_contents_survive_the_wire():
    given = contents()
    frame = transfer_frame(WRITE, 0, [1, 2, 3])
    message, found = wire_arrays.read_write(wire_arrays.write(frame, given))
    assert np.array_equal(message, frame)
    assert found.keys() == given.keys()
    for name, part in given.items():
        assert (found[name].dtype, found[name].shape) == (part.dtype, part.shape)
        assert np.array_equal(stored_bits(found[name]), stored_bits(part))


@pytest.mark.parametrize(
    "head",
    ["[]", "{}", "3", '{"a": 1}', '{"a": []}', '{"a": ["int8", -1]}', "nonsense",
     '{"a": ["what", 2]}', '{"a": ["int8", 2.0]}', '{"a": ["int8", 9]}',
     '{"a": [["int8"], 2]}', '{"a": ' + "[" * 9000],
)  # fmt: skip
def test_damaged_contents_are_refused(head):
    text = head.encode()
    with pytest.raises(ProtocolError, match="contents: found"):
        wire_arrays.read_contents(struct.pack("<i", len(text)) + text + b"ab")


@pytest.mark.parametrize("size", range(0, 40, 3))
def test_contents_that_are_cut_off_are_refused(size):
    payload = wire_arrays.contents(contents())
    with pytest.raises(ProtocolError, match="contents: found"):
        wire_arrays.read_contents(payload[:size])
    with pytest.raises(ProtocolError, match="contents: found"):
        wire_arrays.read_contents(payload[: -size - 1])


def test_heads_are_divided_and_joined():
    given = contents()
    del given["half"]
    shares = divided(given, 2, HEADS)
    assert [share["cells"].shape[HEADS] for share in shares] == [1, 1]
    assert [share["scales"].shape[HEADS] for share in shares] == [1, 1]
    assert shares[1]["bits"].shape == (2, 2)
    found = joined(shares, HEADS)
    for name, part in given.items():
        assert np.array_equal(stored_bits(found[name]), stored_bits(part))


def test_other_constant_scales_are_refused():
    layout = CacheLayout((BlockLayout(1, 4, 2, 8, "float8_e4m3", (0.5, 2.0)),))
    cells = HostArray(np.zeros((1, 2, 1, 4, 2, 8), np.uint8), "float8_e4m3",
                      (1, 2, 1, 4, 2, 8))  # fmt: skip
    scales = np.array([[0.5, 2.0]], np.float32)
    layout.check(0, 1, {"cells": cells, "scales": wrap(scales)})
    with pytest.raises(ProtocolError, match="other constant scales"):
        layout.check(0, 1, {"cells": cells, "scales": wrap(scales * 2)})


def test_a_layout_survives_the_wire(small):
    slotted = (Slotted("velocity", (3, 4), "float32", "replay"),)
    layout = CacheLayout((BlockLayout(1, 4, 2, 8, "float8_e4m3", (0.5, 2.0)),), slotted)
    ready = wire_json.Ready(small(), "x:0", "float32", layout)
    assert wire_json.read_ready(wire_json.ready(ready), "w").cache == layout
    bad = json.loads(wire_json.ready(ready))
    for wrong in ([1], [[[1, 2]], []], [[[0, 4, 2, 8, "a", []]], []], "x", {"a": 1}):
        with pytest.raises(ProtocolError, match="READY: cache"):
            wire_json.read_ready(json.dumps({**bad, "cache": wrong}).encode(), "w")
