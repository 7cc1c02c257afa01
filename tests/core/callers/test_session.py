"""The caller protocol on byte streams, with frames that this file encodes itself."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.callers.frames import VERSION, Kind
from inl.callers.session import Session
from inl.engine.inference_engine import InferenceEngine

HELLO, OPEN, READY, REQUEST, TOKENS, DONE, CANCEL, ERROR, CLOSE = range(1, 10)
START = [(HELLO, struct.pack("<I", 1)), (OPEN, b"{}")]


def encode(kind, payload=b""):
    return b"IC" + struct.pack("<HI", kind, len(payload)) + payload


def decode(data):
    found = []
    while data:
        assert data[:2] == b"IC"
        kind, size = struct.unpack_from("<HI", data, 2)
        found.append((kind, data[8 : 8 + size]))
        data = data[8 + size :]
    return found


def request(number, prompt="ab", **options):
    body = json.dumps({"prompt": prompt, **options}).encode()
    return REQUEST, struct.pack("<I", number) + body


def answers(data):
    """Run a session on the bytes that a caller sends, then the end."""
    sink = io.BytesIO()
    ended = Session(io.BytesIO(data), sink).run()
    return ended, decode(sink.getvalue())


@pytest.fixture
def gate():
    """An event without which engines stop after their third step."""
    event = threading.Event()
    event.set()
    yield event
    event.set()


@pytest.fixture
def opened(engines, monkeypatch, gate):
    """Let OPEN open a tiny model; returns the settings that it got."""
    seen = []

    def wait(record):
        if record.step >= 3:
            gate.wait(300)

    def open_model(_, model, config):
        seen.append((model, config))
        return engines(on_step=wait)

    monkeypatch.setattr(InferenceEngine, "from_pretrained", classmethod(open_model))
    return seen


class Caller:
    """A caller on two pipes."""

    def __init__(self):
        (source, self.out), (self.back, sink) = os.pipe(), os.pipe()
        streams = os.fdopen(source, "rb"), os.fdopen(sink, "wb")
        self.answers = os.fdopen(self.back, "rb")
        self.thread = threading.Thread(target=self.serve, args=streams)
        self.thread.start()

    def serve(self, source, sink):
        with source, sink:
            Session(source, sink).run()

    def send(self, *frames):
        os.write(self.out, b"".join(encode(*each) for each in frames))

    def receive(self):
        _, kind, size = struct.unpack("<2sHI", self.answers.read(8))
        return kind, self.answers.read(size)

    def close(self):
        os.close(self.out)
        self.answers.read()
        self.thread.join(300)
        assert not self.thread.is_alive()
        self.answers.close()


@pytest.fixture
def caller(opened):
    made = Caller()
    made.send(*START)
    assert [made.receive()[0], made.receive()[0]] == [HELLO, READY]
    yield made
    made.close()


def collect(caller, count):
    """Receive until ``count`` requests have ended: tokens, texts and last frames."""
    tokens, texts, last = {}, {}, {}
    while len(last) < count:
        kind, payload = caller.receive()
        (number,) = struct.unpack_from("<I", payload)
        if kind == TOKENS:
            (size,) = struct.unpack_from("<I", payload, 4)
            ids = struct.unpack_from(f"<{size}i", payload, 8)
            tokens.setdefault(number, []).extend(ids)
            text = payload[8 + 4 * size :].decode()
            texts[number] = texts.get(number, "") + text
        else:
            last[number] = kind, payload[4:]
    return tokens, texts, last


def test_requests_at_the_same_time_equal_those_of_python(caller, engines):
    prompts = {1: "Hello", 7: "ab ab", 4_000_000_000: "é"}
    caller.send(*(request(n, text, max_tokens=9) for n, text in prompts.items()))
    tokens, texts, last = collect(caller, 3)
    engine = engines()
    for number, prompt in prompts.items():
        want = engine.generate(prompt, max_tokens=9)
        assert tuple(tokens[number]) == want.token_ids
        assert texts[number] == want.text
        head = struct.pack("<I", want.prompt_tokens)
        assert last[number] == (DONE, head + want.finish_reason.encode())


def test_a_cancelled_request_ends_and_its_number_is_free(caller, gate):
    gate.clear()
    caller.send(request(3, max_tokens=90))
    assert caller.receive()[0] == TOKENS
    cancels = [(CANCEL, struct.pack("<I", number)) for number in (3, 99)]
    caller.send(*cancels, request(4, max_tokens=-1))
    while caller.receive()[0] != ERROR:
        """Wait for the answer to what follows the cancellation."""
    gate.set()
    tokens, _, last = collect(caller, 1)
    assert last[3] == (DONE, struct.pack("<I", 2) + b"cancelled")
    assert len(tokens.get(3, ())) < 89
    caller.send(request(3, [97, 98], max_tokens=2))
    tokens, _, last = collect(caller, 1)
    assert len(tokens[3]) == 2
    assert last[3][1][4:] == b"length"


def test_a_number_is_free_once_its_end_is_read(caller, monkeypatch):
    send = Session._send

    def slow(session, kind, payload):
        send(session, kind, payload)
        if kind is Kind.DONE:
            time.sleep(0.2)  # what follows an end may be late

    monkeypatch.setattr(Session, "_send", slow)
    for _ in range(2):
        caller.send(request(3, [97, 98], max_tokens=2))
        tokens, _, last = collect(caller, 1)
        assert len(tokens[3]) == 2
        assert last[3][0] == DONE


REFUSED = {
    "max_tokens: found -1": {"max_tokens": -1},
    "options: found listener": {"listener": 1},
    "options: found surprise": {"surprise": 1},
    "n: found 2": {"n": 2},
    "logit_bias: accepted: token ids": {"logit_bias": {"a": 1}},
    "found prompt and messages": {"messages": []},
    "prompt: found 3.5": {"prompt": 3.5},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_refused_request_leaves_the_connection_open(caller, sentence):
    caller.send(request(5, **REFUSED[sentence]), request(6, max_tokens=1))
    last = collect(caller, 2)[2]
    assert last[5][0] == ERROR
    assert sentence in last[5][1].decode()
    assert last[6][0] == DONE


def test_options_have_an_effect(caller):
    bias = {str(ord("x")): 1e9}
    caller.send(request(1, max_tokens=3, logit_bias=bias))
    assert collect(caller, 1)[0] == {1: [ord("x")] * 3}


BROKEN = {
    "protocol version 2, this inl has 1": encode(HELLO, struct.pack("<I", 2)),
    "at the start of a frame": b"GET / HTTP/1.1\r\n",
    "found frame kind 77": b"IC" + struct.pack("<HI", 77, 0),
    "found a payload of 268,435,456 bytes": b"IC" + struct.pack("<HI", 1, 1 << 28),
    "found 3 bytes of a frame, then the end": b"ICx",
    "found 1 of the 4 bytes of a HELLO": encode(HELLO, b"\1\0\0\0")[:9],
    "found OPEN, accepted: HELLO": encode(OPEN, b"{}"),
    "HELLO: found 0 bytes, needs 4": encode(HELLO),
    "OPEN: not JSON": encode(*START[0]) + encode(OPEN, b"{"),
    "OPEN: found a JSON int; accepted: one JSON object": encode(*START[0])
    + encode(OPEN, b"3"),
    "found ['bits'], accepted: model, and": encode(*START[0])
    + encode(OPEN, b'{"bits": 4}'),
    "found ['bits'], accepted: model, and config": encode(*START[0])
    + encode(OPEN, b'{"config": {"bits": 4}}'),
    "EngineConfig.max_batch: found -1": encode(*START[0])
    + encode(OPEN, b'{"config": {"max_batch": -1}}'),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_what_breaks_a_connection_is_named(sentence):
    ended, found = answers(BROKEN[sentence])
    assert not ended
    kind, payload = found[-1]
    assert (kind, payload[:4]) == (ERROR, bytes(4))
    assert sentence in payload[4:].decode()


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (request(0), "REQUEST: found number 0"),
        ((OPEN, b"{}  "), "found OPEN, accepted: REQUEST, CANCEL, CLOSE"),
        ((CANCEL, b"1"), "CANCEL: found 1 bytes"),
    ],
)
def test_what_breaks_an_open_connection_is_named(opened, frame, sentence):
    data = b"".join(encode(*each) for each in (*START, frame))
    ended, found = answers(data)
    assert not ended
    assert found[-1][0] == ERROR
    assert sentence in found[-1][1].decode()


def test_settings_reach_the_engine(opened):
    body = b'{"model": "folder", "config": {"max_batch": 3}}'
    assert answers(encode(*START[0]) + encode(OPEN, body) + encode(CLOSE))[0]
    ((model, config),) = opened
    assert (model, config.max_batch) == ("folder", 3)


def test_a_caller_may_leave_at_any_time(opened):
    assert answers(b"") == (True, [])
    assert answers(encode(*START[0])) == (True, START[:1])
    ended, found = answers(b"".join(encode(*each) for each in (*START, request(1))))
    assert ended
    assert [kind for kind, _ in found[:2]] == [HELLO, READY]


def test_the_page_lists_every_kind_of_frame():
    page = Path(__file__).parents[3] / "docs" / "callers.md"
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page.read_text("utf-8"), re.M)
    assert {name: int(number) for number, name in rows} == dict(Kind.__members__)
    assert f"## Protocol, version {VERSION}\n" in page.read_text("utf-8")


@examples(40, 2000)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.binary(max_size=12)).filter(
            lambda frame: not (frame[0] == OPEN and frame[1][:1] == b"{")  # a model
        ),
        max_size=4,
    ),
    st.binary(max_size=20),
)
def test_no_bytes_raise(frames, rest):
    data = b"".join(encode(*each) for each in frames) + rest
    ended, found = answers(encode(*START[0]) + data)
    assert found[0] == START[0]
    assert ended or found[-1][0] == ERROR
