"""Frames between a process and its worker, under bytes that no one meant."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inl.errors import InlError, OutOfMemory, ProtocolError, RunnerError
from inl.progress import LoadStage
from inl.protocol import wire_arrays, wire_json
from inl.protocol.runner import Limits, Reply, pooled_reply
from inl.protocol.wire import MAX_BYTES, MAX_TEXT, Channel, Kind, read_prefix
from inl.spec.encoder import TokenSequence
from inl.spec.step import NO_TOKEN, Bucket, Scores
from outcomes import Outcomes

LIMITS = Limits(
    5,
    (9, 7),
    4,
    8,
    100,
    (Bucket(1, 1), Bucket(8, 4, 1, "sample")),
    3,
    "sample",
    max_drafts=4,
)
HIDDEN = np.array([[0.5, -1, 3], [2, 4, -0.25]], np.float32)
SCORES = Scores(
    np.array([-0.5, -9.25], np.float32),
    np.array([[1, 2, 3], [4, 5, 6]], np.int32),
    np.array([[-1, -2, -3.5], [-0.125, -1e9, -7]], np.float32),
)
GOOD = {
    "limits": lambda b: wire_json.read_limits(
        wire_json.read_text(b, "w").get("l"), "w"
    ),
    "ready": lambda b: wire_json.read_ready(b, "w"),
    "hello": lambda b: wire_json.check_hello(b, "w"),
    "failure": lambda b: wire_json.read_failure(b, "w"),
    "reply": wire_arrays.read_reply,
    "scored reply": wire_arrays.read_reply,
    "pooled reply": wire_arrays.read_reply,
    "masks": wire_arrays.read_masks,
    "sequences": wire_arrays.read_sequences,
    "results": lambda b: wire_arrays.read_results(b, 2),
    "progress": wire_arrays.read_progress,
    "prefix": lambda b: read_prefix(b) if len(b) >= 8 else None,
}
SEQUENCES = [TokenSequence([5, 6, 7], [0, 0, 1]), TokenSequence([8])]
SAMPLES = {
    "sequences": bytes(wire_arrays.sequences(SEQUENCES)),
    "results": wire_arrays.results(HIDDEN),
    "limits": wire_json.text({"l": asdict(LIMITS)}),
    "ready": wire_json.ready(wire_json.Ready(LIMITS, "cpu:0", "float32")),
    "hello": wire_json.text(wire_json.hello()),
    "failure": wire_json.failure(OutOfMemory("1 byte")),
    "reply": bytes(wire_arrays.reply(Reply(3, np.array([[4], [5]], np.int32)))),
    "scored reply": bytes(
        wire_arrays.reply(Reply(3, np.array([[4], [5]], np.int32), SCORES))
    ),
    "pooled reply": bytes(wire_arrays.reply(pooled_reply(3, HIDDEN))),
    "masks": bytes(wire_arrays.masks(3, np.ones((2, 4), np.int32))),
    "progress": wire_arrays.progress(1, 2, LoadStage.PACKING),
    "prefix": struct.pack("<HHI", 0x4C49, 8, 12),
}


@pytest.fixture
def ends():
    """Two channels that are connected."""
    pair = [Channel(each) for each in socket.socketpair()]
    yield pair
    for each in pair:
        each.close()


def test_frames_come_as_they_were_sent(ends):
    near, far = ends
    sent = [(Kind.COLLECT, b""), (Kind.MESSAGE, b"abcd"), (Kind.OPEN, b"{}" * 70_000)]
    for kind, payload in sent:
        near.send(kind, payload)
    assert [tuple(far.receive(5)) for _ in sent] == sent
    assert far.receive(0.01) is None


def test_more_than_the_socket_holds_waits_on_this_side(ends):
    near, far = ends
    payloads = [bytes([index]) * 1_000_000 for index in range(8)]
    for payload in payloads:
        near.send(Kind.MESSAGE, payload)
    found = []
    while len(found) < 8:
        near.flush()
        if (frame := far.receive(0)) is not None:
            found.append(frame.payload)
    assert found == payloads


def test_the_end_of_the_other_side(ends):
    near, far = ends
    far.send(Kind.COLLECT)
    far.close()
    assert near.receive(5).kind is Kind.COLLECT
    with pytest.raises(EOFError):
        near.receive(5)
    with pytest.raises(EOFError):
        near.send(Kind.COLLECT)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1", "HTTP/1.1"),
        (struct.pack("<HHI", 0x4C49, 18, 0), "kind 18, accepts 1 to 17"),
        (struct.pack("<HHI", 0x4C49, 0, 0), "kind 0"),
        (struct.pack("<HHI", 0x4C49, 5, MAX_BYTES + 1), "accepts 268,435,456"),
        (struct.pack("<HHI", 0x4C49, 1, MAX_TEXT + 1), "HELLO of 1,048,577 bytes"),
    ],
)
def test_what_no_frame_begins_with(data, words):
    with pytest.raises(ProtocolError, match=words):
        read_prefix(data)


def test_values_come_back():
    ready = wire_json.Ready(LIMITS, "cpu:0", "float32")
    assert wire_json.read_ready(wire_json.ready(ready), "w") == ready
    repeated = replace(LIMITS, buckets=(Bucket(3, 3, repeat=4),), decode_steps=4)
    ready = wire_json.Ready(repeated, "cpu:0", "float32")
    assert wire_json.read_ready(wire_json.ready(ready), "w") == ready
    inputs = replace(
        LIMITS, axes=3, spans=True, feature_layers=(0, 2), stages=3, data_ranks=2
    )
    ready = wire_json.Ready(inputs, "cpu:0", "float32")
    assert wire_json.read_ready(wire_json.ready(ready), "w") == ready
    step, rows = wire_arrays.read_masks(SAMPLES["masks"])
    assert (step, rows.tolist()) == (3, [[1] * 4] * 2)
    reply = wire_arrays.read_reply(SAMPLES["reply"])
    assert (reply.step, reply.tokens.tolist()) == (3, [[4], [5]])
    assert wire_arrays.read_progress(SAMPLES["progress"]) == (1, 2, LoadStage.PACKING)
    with pytest.raises(ProtocolError, match="stage: found 3, accepts 0 to 2"):
        wire_arrays.read_progress(wire_arrays.PROGRESS.pack(1, 2, 3))
    # A new field of either must also be sent.
    assert Reply._fields == ("step", "tokens", "scores", "hidden", "loads")
    assert len(fields(Limits)) == 21
    assert reply.scores is None
    assert reply.hidden is None
    told = wire_arrays.read_reply(SAMPLES["pooled reply"])
    assert (told.step, told.tokens.tolist()) == (3, [[NO_TOKEN]] * 2)
    assert (told.hidden.dtype, told.hidden.tolist()) == (np.float32, HIDDEN.tolist())
    told = wire_arrays.read_reply(SAMPLES["scored reply"]).scores
    for found, want in zip(told, SCORES, strict=True):
        assert found.dtype == want.dtype
        assert found.tolist() == want.tolist()
    strided = np.arange(12, dtype=np.int32)[::3]
    assert wire_arrays.ints(bytes(wire_arrays.words(strided)), "x").tolist() == [
        0, 3, 6, 9,
    ]  # fmt: skip


def test_errors_come_back_as_their_class():
    assert type(wire_json.read_failure(SAMPLES["failure"], "w")) is OutOfMemory
    for name in ("SystemExit", "annotations", "__name__", "Exception"):
        payload = wire_json.text({"class": name, "message": "m"})
        found = wire_json.read_failure(payload, "w")
        assert type(found) is RunnerError
        assert f"{name}: m" in str(found)


@st.composite
def mutated(draw):
    """A reader's name, and a sample of it with a few bytes changed, cut or added."""
    name = draw(st.sampled_from(sorted(GOOD)))
    data = bytearray(SAMPLES[name])
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return name, data


def test_readers_read_or_refuse(depth):
    outcomes = Outcomes()

    @settings(max_examples=depth(150, 600))
    @given(mutated())
    def check(case):
        name, data = case
        with outcomes.refused_by(ProtocolError):
            GOOD[name](data)

    check()
    outcomes.check()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=4), each)
    ),
    max_leaves=8,
)


def test_json_of_any_shape_is_read_or_refused(depth):
    outcomes = Outcomes()

    @settings(max_examples=depth(100, 300))
    @given(
        st.sampled_from(["limits", "ready", "hello", "failure"]),
        st.data(),
        JSON,
    )
    def check(name, data, value):
        whole = json.loads(SAMPLES[name])
        inner = whole.get("limits", whole.get("l"))
        target = inner if inner is not None and data.draw(st.booleans()) else whole
        target[data.draw(st.sampled_from(sorted(target)))] = value
        with outcomes.refused_by(ProtocolError):
            GOOD[name](wire_json.text(whole))

    check()
    outcomes.check()


def test_deep_and_odd_json():
    for data in (b"[" * 100_000, b"\xff\xfe", b"3", b"", b'{"a": NaN'):
        with pytest.raises(ProtocolError):
            wire_json.read_text(data, "w")


def test_a_mutated_stream_ends_in_frames_or_a_refusal(depth):
    """Whatever comes before the end, the reader stops: no hang, no other error."""
    outcomes = Outcomes()

    @settings(max_examples=depth(60, 200))
    @given(st.binary(max_size=64), st.integers(0, 40))
    def check(noise, at):
        with outcomes.refused_by(InlError):
            read_mutated_stream(noise, at)

    check()
    outcomes.check()


def read_mutated_stream(noise, at):
    ours, theirs = socket.socketpair()
    stream = bytearray(
        b"".join(
            struct.pack("<HHI", 0x4C49, kind, 4) + b"abcd"
            for kind in (Kind.MESSAGE, Kind.REPLY, Kind.COLLECT)
        )
    )
    stream[at : at + len(noise)] = noise
    with ours, theirs:
        channel = Channel(ours)
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)
        for _ in range(100):
            try:
                frame = channel.receive(5)
            except EOFError:
                return
            assert frame is not None, "waited although the stream has ended"
    raise AssertionError("more frames than bytes")


def test_only_fields_without_their_default_are_sent():
    least = Limits(slots=2, blocks=(3,), block_size=4, max_blocks_per_seq=2, vocab=5)
    told = json.loads(wire_json.ready(wire_json.Ready(least, "cpu:0", "float32")))
    assert set(told["limits"]) == {
        "slots", "blocks", "block_size", "max_blocks_per_seq", "vocab",
    }  # fmt: skip
    limits = replace(least, buckets=(Bucket(tokens=4, rows=2),), embedding=8)
    told = json.loads(wire_json.ready(wire_json.Ready(limits, "cpu:0", "float32")))
    assert told["limits"]["buckets"] == [{"tokens": 4, "rows": 2}]
    assert told["limits"]["embedding"] == 8


@pytest.mark.parametrize("place", ["ready", "limits", "bucket"])
def test_a_field_of_a_later_version_is_refused_by_its_name(place):
    whole = json.loads(SAMPLES["ready"])
    at = {
        "ready": whole,
        "limits": whole["limits"],
        "bucket": whole["limits"]["buckets"][1],
    }[place]
    at["planets"] = [2, 2]
    with pytest.raises(ProtocolError, match="found 'planets', which this version does"):
        wire_json.read_ready(wire_json.text(whole), "w")


def test_an_absent_field_needs_a_default():
    whole = json.loads(SAMPLES["ready"])
    del whole["limits"]["vocab"]
    with pytest.raises(ProtocolError, match="limits: found no vocab, which it needs"):
        wire_json.read_ready(wire_json.text(whole), "w")


def test_buckets_of_earlier_traces_are_lists():
    whole = {**asdict(LIMITS), "buckets": [[1, 1, 1, "greedy"], [4, 4, 1, "sample", 3]]}
    read = wire_json.read_limits(json.loads(json.dumps(whole)), "w")
    assert read.buckets == (Bucket(1, 1), Bucket(4, 4, 1, "sample", 3))
    whole["buckets"] = [[1, 1, 1, "greedy", 1, 2, 3, 4, 5, 6, 7]]
    with pytest.raises(ProtocolError):
        wire_json.read_limits(json.loads(json.dumps(whole)), "w")


def test_sequences_and_their_results():
    found = wire_arrays.read_sequences(SAMPLES["sequences"])
    assert found == [SEQUENCES[0], TokenSequence([8], [0])]
    rows = wire_arrays.read_results(SAMPLES["results"], 2)
    np.testing.assert_array_equal(rows, HIDDEN)
    with pytest.raises(ProtocolError, match="expected 3 rows"):
        wire_arrays.read_results(SAMPLES["results"], 3)
    for words in ([], [-1], [2, 3], [1, 0], [1, 2, 5, 6, 0], [1, -(2**31)]):
        with pytest.raises(ProtocolError, match="sequences: found"):
            wire_arrays.read_sequences(wire_arrays.words(np.array(words, np.int32)))
