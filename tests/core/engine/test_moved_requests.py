"""Requests that go on in another engine: their tokens are those of staying."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from random import Random

import numpy as np
import pytest

from inl.dtypes import HostArray
from inl.engine import core, request_migration, scheduler_setup
from inl.engine.inference_engine import MovedRequest
from inl.errors import ProtocolError, RequestError
from inl.kv_transfer import spans
from inl.testing.hash_runner import CHAIN, HashRunner
from moved_draws import OPTIONS, limits_of, prompt_of

KINDS = {
    "one group": [limits_of(4), limits_of(16), limits_of(6)],
    "windows": [limits_of(4, (None, 9)), limits_of(8, (None, 9))],
}
WITHOUT_TIERS = [limits_of(4, slots=6), limits_of(16, slots=6)]
KINDS["without tiers"] = WITHOUT_TIERS
KINDS["state"] = KINDS["one group"]
KINDS["state and windows"] = [limits_of(4, (None, 9)), limits_of(4, (None, 9))]


@pytest.fixture(autouse=True)
def recurrent(monkeypatch):
    """Models of some kinds have state that every token changes."""
    monkeypatch.setattr(scheduler_setup, "is_recurrent", lambda _: RECURRENT[0])
    monkeypatch.setitem(RECURRENT, 0, False)


RECURRENT = {0: False}


def made(engines, limits, **settings):
    recurrent = RECURRENT[0]
    runner = HashRunner(limits, lag=Random(1), recurrent=recurrent)
    kv_host = None if recurrent or limits in WITHOUT_TIERS else "1MiB"
    return engines(runner=runner, kv_host=kv_host, **settings)


def moved_on(world, request, draw):
    """Send a request to another engine, sometimes as bytes."""
    try:
        moved = world[request["at"]].export_request(request["handle"])
    except RequestError:
        # Its last step was in flight.
        assert request["handle"].finish_reason in ("stop", "length")
        return None
    if draw.random() < 0.5:
        moved = MovedRequest.from_bytes(moved.to_bytes())
    request["at"] = draw.choice([at for at in range(len(world)) if at != request["at"]])
    request["handle"] = world[request["at"]].import_request(moved)
    return moved


def soak(engines, kind, seed, steps, report=None):
    draw, counts = Random(seed), Counter()
    RECURRENT[0] = kind.startswith("state")
    world = [made(engines, limits) for limits in KINDS[kind]]
    runner = HashRunner(KINDS[kind][0], recurrent=RECURRENT[0])
    alone = engines(runner=runner, prefix_cache=False)
    live = []
    for _ in range(steps):
        if len(live) < 5 and draw.random() < 0.3:
            options = {"seed": draw.randrange(99), "max_tokens": draw.randint(1, 24)}
            options |= draw.choice(OPTIONS)
            prompt, at = prompt_of(draw), draw.randrange(len(world))
            handle = world[at].submit(prompt, **options)
            live.append({"handle": handle, "at": at, "asked": (prompt, options)})
        if live and draw.random() < 0.2:
            request = draw.choice(live)
            if not request["handle"].completed:
                if (moved := moved_on(world, request, draw)) is None:
                    continue
                counts["moves"] += 1
                counts["with tokens"] += bool(moved.output_ids)
                counts["blocks"] += sum(span.blocks for span in moved.spans)
        draw.choice(world).step()
        for request in [each for each in live if each["handle"].completed]:
            live.remove(request)
            prompt, options = request["asked"]
            found, wanted = (
                request["handle"].completion(),
                alone.generate(prompt, **options),
            )
            for name in ("text", "token_ids", "finish_reason", "logprobs",
                         "prompt_logprobs", "seed"):  # fmt: skip
                assert getattr(found, name) == getattr(wanted, name), name
            counts["requests"] += 1
            counts["resumed"] += request["handle"].resumed_tokens > 0
            if world[0].tiers is None:
                counts["hits"] += request["handle"].request.cached_tokens > 0
    if world[0].tiers is not None:
        counts["hits"] = sum(engine.tiers.hits["host"] for engine in world)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_staying(engines, kind, depth, report):
    counts = soak(engines, kind, 1, depth(400, 2_000, 20_000))
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for name in ("moves", "with tokens", "blocks", "resumed", "hits"):
        assert counts[name] > 5, name


def test_contents_that_are_cut_wrong_are_found(engines, monkeypatch):
    def beside(self, span):
        for index, parts in add(self, span):
            yield index + 1, parts

    add = spans.Recut.add
    monkeypatch.setattr(spans.Recut, "add", beside)
    with pytest.raises(AssertionError, match=r"text|token_ids"):
        soak(engines, "one group", 1, 2_000)


def without_slot(runner, request, state, recorder):
    write(runner, request, replace(state, slot={**state.slot, **FRESH}), recorder)


def other_blocks(runner, request, state, recorder):
    (first, *rest), *others = state.blocks
    if rest:
        rest[0] = rest[0][0], first[1]
    blocks = ((first, *rest), *others)
    write(runner, request, replace(state, blocks=blocks), recorder)


def other_slot(runner, request, state, recorder):
    slot, request.slot = request.slot, request.slot % 4 + 1
    write(runner, request, state, recorder)
    request.slot = slot


def behind(runner, request, tokens, recorder):
    return read(runner, request, max(tokens - 1, 1), recorder)


FRESH = {CHAIN.name: HostArray(np.zeros(2, np.int32), "int32", (2,))}
read, write = core.read_sequence, core.write_carried
STATE_FAULTS = {
    "no slot": ("write_carried", without_slot),
    "another slot": ("write_carried", other_slot),
    "another block": ("write_carried", other_blocks),
    "a token behind": ("read_sequence", behind),
}


@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_state_that_goes_wrong_is_found(engines, monkeypatch, fault):
    monkeypatch.setattr(core, *STATE_FAULTS[fault])
    with pytest.raises(AssertionError, match=r"text|token_ids"):
        soak(engines, "state", 1, 2_000)


def running(engine, tokens=3, **options):
    """A request that has generated some tokens."""
    handle = engine.submit(list(range(40)), max_tokens=20, temperature=0, **options)
    while len(handle.token_ids) < tokens:
        engine.step()
    return handle


def test_a_moved_request_ends_where_it_was(engines, drained):
    engine, other = (made(engines, limits_of(4)) for _ in range(2))
    handle = running(engine)
    moved = engine.export_request(handle)
    assert handle.finish_reason == "cancelled"
    assert moved.output_ids == tuple(handle.token_ids)
    assert drained(engine)
    again = other.import_request(moved)
    assert again.token_ids == handle.token_ids
    done = again.result()
    assert len(done.token_ids) == 20
    # All full blocks of prompt and output but one whose last token is computed again.
    assert again.request.cached_tokens >= 40
    with pytest.raises(RequestError, match="has finished, accepted: a running one"):
        engine.export_request(handle)


def test_a_request_that_waits_is_moved_without_tokens(engines):
    engine, other = (made(engines, limits_of(4)) for _ in range(2))
    handle = engine.submit([1, 2, 3], max_tokens=5, temperature=0)
    moved = engine.export_request(handle)
    assert (moved.output_ids, list(moved.spans)) == ((), [])
    wanted = engine.generate([1, 2, 3], max_tokens=5, temperature=0)
    assert other.import_request(moved).result().token_ids == wanted.token_ids


def test_a_moved_request_is_served_in_the_background(engines):
    engine, other = (made(engines, limits_of(4)) for _ in range(2))
    moved = engine.export_request(running(engine))
    called = []
    handle = other.import_request(
        moved, listener=lambda: called.append(1), in_background=True
    )
    assert len(handle.result().token_ids) == 20
    assert called


def test_an_engine_without_tiers_begins_with_the_blocks(engines):
    engine = made(engines, limits_of(4))
    other = engines(runner=HashRunner(limits_of(4)))
    wanted = engine.generate(list(range(40)), max_tokens=20, temperature=0)
    handle = other.import_request(engine.export_request(running(engine)))
    assert handle.result().token_ids == wanted.token_ids
    assert handle.request.cached_tokens >= 40
    # They are shared, as if they had been computed here.
    assert other.generate(list(range(40)), max_tokens=1).cached_tokens == 36


def test_contents_beyond_the_room_are_computed(engines, monkeypatch):
    monkeypatch.setattr(request_migration, "MAX_BYTES", 400)
    engine = made(engines, limits_of(4))
    other = engines(runner=HashRunner(limits_of(4)))
    wanted = engine.generate(list(range(40)), max_tokens=20, temperature=0)
    moved = engine.export_request(running(engine))
    handles = [other.import_request(moved) for _ in range(2)]
    # Each has 320 bytes and more; both wait.
    assert [each.request.carried is None for each in handles] == [False, True]
    for each in handles:
        assert each.result().token_ids == wanted.token_ids


@pytest.mark.parametrize(
    "change",
    [
        lambda span: span._replace(group=1),
        lambda span: span._replace(group=-1),
        lambda span: span._replace(start=span.start + 1),
        lambda span: span._replace(parts={}),
    ],
)
def test_contents_that_do_not_fit_are_computed(engines, change, caplog):
    engine, other = (made(engines, limits_of(4)) for _ in range(2))
    wanted = engine.generate(list(range(40)), max_tokens=20, temperature=0)
    moved = engine.export_request(running(engine))
    handle = other.import_request(replace(moved, spans=list(map(change, moved.spans))))
    assert handle.result().token_ids == wanted.token_ids
    assert "its tokens are computed again" in caplog.text


def test_another_model_refuses(engines):
    engine, other = (made(engines, limits_of(4)) for _ in range(2))
    moved = engine.export_request(running(engine))
    with pytest.raises(RequestError, match="moved request: of the model"):
        other.import_request(replace(moved, model="other"))
    with pytest.raises(RequestError, match="found token 256, the vocabulary is"):
        other.import_request(replace(moved, output_ids=(256,)))
    with pytest.raises(RequestError, match="adapter"):
        other.import_request(replace(moved, adapter_digest="other"))


def test_each_byte_is_covered_by_the_checksum(engines):
    engine, draw = made(engines, limits_of(4)), Random(1)
    data = engine.export_request(running(engine, logit_bias={3: 1.5})).to_bytes()
    assert MovedRequest.from_bytes(data).options["logit_bias"] == {3: 1.5}
    for _ in range(50):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        with pytest.raises(ProtocolError, match="checksum"):
            MovedRequest.from_bytes(bytes(damaged))
    for stop in (0, 31, 32, 40, len(data) - 1):
        with pytest.raises(ProtocolError):
            MovedRequest.from_bytes(data[:stop])


@pytest.mark.parametrize(
    "body", [b"", b"\1", b"\1\0\0\0\0\0\0\0{", b"\x0d" + bytes(7) + b'{"spans":1e}']
)
def test_bytes_with_a_right_checksum_are_not_trusted(body):
    with pytest.raises(ProtocolError, match="moved request"):
        MovedRequest.from_bytes(sha256(body).digest() + body)
