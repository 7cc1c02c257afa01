"""Prompts that another engine computes: the tokens are those of computing them here."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from inl.dtypes import HostArray
from inl.engine import (
    prefill_port,
    remote_prefill,
)
from inl.errors import DeviceError, RequestError
from inl.kv_transfer import span_messages
from inl.kv_transfer.link import Kind, Link
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from inl.workers.settings import parse_address
from waiting import until

VOCAB = 256
LINKS = []
"""Connections of the decoding engines."""


def limits_of(size, windows=()):
    return Limits(
        slots=5, blocks=(96 // size * 6,) * max(len(windows), 1), block_size=size,
        max_blocks_per_seq=-(-96 // size), vocab=VOCAB, depth=2, windows=windows,
        sampler="sample_filtered", token_budget=16,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch, patient_links):
    monkeypatch.setattr(remote_prefill, "LEAST_TOKENS", 8)
    monkeypatch.setattr(remote_prefill, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(prefill_port, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(remote_prefill.RemotePrefill.__init__, "__kwdefaults__",
                        {"seconds": 300.0})  # fmt: skip
    connect = remote_prefill.connect

    def connected(*arguments):
        LINKS.append(connect(*arguments))
        return LINKS[-1]

    monkeypatch.setattr(remote_prefill, "connect", connected)
    LINKS.clear()


@pytest.fixture
def pair(engines, has_state):
    """Makes a prefilling and a decoding engine."""

    def make(here=4, there=4, windows=()):
        far = engines(
            runner=HashRunner(limits_of(there, windows), recurrent=has_state),
            role="prefill", kv_peer="127.0.0.1:0",
        )  # fmt: skip
        near = engines(
            runner=HashRunner(limits_of(here, windows), recurrent=has_state),
            role="decode", kv_peer=far.prefill_port.address, kv_host="1MiB",
        )  # fmt: skip
        return far, near

    return make


@pytest.fixture
def alone(engines, has_state):
    runner = HashRunner(limits_of(4), recurrent=has_state)
    return engines(runner=runner, prefix_cache=False)


PROMPT = list(range(100, 160))
OPTIONS = {"max_tokens": 6, "temperature": 0.9, "seed": 5}


@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (16, 4), (6, 4)])
def test_a_prompt_is_computed_there(pair, alone, sizes, has_state):
    far, near = pair(*sizes)
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    whole = 60 // sizes[1] * sizes[1] // sizes[0] * sizes[0]
    cached = min(whole, 59 // sizes[0] * sizes[0])
    assert found.cached_tokens == (59 if has_state else cached)
    assert near.remote_prefill.counts["done"] == 1
    # It counts what it has sent, and the other side may be faster.
    until(lambda: far.prefill_port.counts["done"] == 1)
    if has_state:
        return
    # The second time, the device has all of it.
    near.generate(PROMPT, **OPTIONS)
    assert near.remote_prefill.counts["done"] == 1


def test_windows_are_shared(pair, engines, has_state):
    windows = (None, 9)
    _, near = pair(4, 4 if has_state else 8, windows)
    runner = HashRunner(limits_of(4, windows), recurrent=has_state)
    alone = engines(runner=runner, prefix_cache=False)
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert found.cached_tokens >= 48


def test_each_way_to_ask_is_served(pair, alone):
    _, near = pair()
    wanted = alone.generate(PROMPT, **OPTIONS).token_ids
    salts = iter("abcd")

    def options():
        return {**OPTIONS, "cache_salt": next(salts)}

    assert near.submit(PROMPT, **options()).result().token_ids == wanted
    pieces = near.stream(PROMPT, **options())
    assert [token for piece in pieces for token in piece.token_ids] == list(wanted)
    handle = near.start(PROMPT, listener=None, **options())
    assert handle.result().token_ids == wanted
    both = near.generate([PROMPT, PROMPT[::-1]], **options())
    assert both[0].token_ids == wanted
    assert near.remote_prefill.counts["done"] == 5


def held(near, monkeypatch):
    """Let tickets of an engine wait; returns the event that lets them go."""
    may_go = threading.Event()
    outcome = near.remote_prefill._outcome

    def slow(handle, address):
        assert may_go.wait(300)
        return outcome(handle, address)

    monkeypatch.setattr(near.remote_prefill, "_outcome", slow)
    return may_go


def test_a_cancelled_request_does_not_wait(pair, monkeypatch):
    """Its ticket has no outcome before it has been cancelled."""
    _, near = pair()
    may_go = held(near, monkeypatch)
    handle = near.start(PROMPT, listener=None, **OPTIONS)
    handle.cancel()
    may_go.set()
    assert handle.result().finish_reason == "cancelled"
    assert len(near.generate(PROMPT, **OPTIONS).token_ids) == 6


def test_short_prompts_are_computed_here(pair):
    _, near = pair()
    near.generate(PROMPT[:7], **OPTIONS)
    assert not near.remote_prefill.counts


def test_short_prompts_do_not_wait_for_tickets_of_long_ones(pair, monkeypatch):
    """The threads of all tickets are busy until the short prompt has its text."""
    _, near = pair()
    may_go = held(near, monkeypatch)
    count = remote_prefill.THREADS
    long = [
        near.start([each, *PROMPT], listener=None, max_tokens=1)
        for each in range(count)
    ]
    try:
        found = near.start(PROMPT[:7], listener=None, **OPTIONS).result()
        assert len(found.token_ids) == 6
        assert not any(each.completed for each in long)
    finally:
        may_go.set()
    for each in long:
        each.result()


def test_a_request_after_the_end_of_tickets_is_computed_here(pair, alone):
    _, near = pair()
    near.remote_prefill.close()
    wanted = alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.generate(PROMPT, **OPTIONS).token_ids == wanted
    assert near.start(PROMPT, listener=None, **OPTIONS).result().token_ids == wanted
    assert not near.remote_prefill.counts


@pytest.mark.parametrize(
    "field", [{"seconds": "nan"}, {"seconds": -1}, {"prompt": [1e999]}, {"prompt": 3}]
)
def test_tickets_that_are_not_valid_are_refused(field):
    fields = {
        "ticket": "a", "identity": "b", "seconds": 5, "prompt": [1], "adapter": None,
        "adapter_digest": "", "salt": "", "key": "",
    }  # fmt: skip
    assert prefill_port._Ask(fields).prompt == [1]
    with pytest.raises(RequestError, match="ticket: found a field"):
        prefill_port._Ask({**fields, **field})


# What a wrong sender does: sends other fields or contents, nothing, or late.


def stale_ticket(draw, fields, parts):
    return {**fields, "ticket": "00" * 16}, parts


def other_tokens(draw, fields, parts):
    return {**fields, "tokens": "00" * 32}, parts


def other_group(draw, fields, parts):
    return {**fields, "group": 3}, parts


def shifted(draw, fields, parts):
    return {**fields, "start": fields["start"] + fields["block_size"]}, parts


def truncated(draw, fields, parts):
    ((name, part),) = parts.items()
    data = part.data.reshape(part.shape)
    data = (data[:, :, :, :-1] if name == "cells" else data[:-1]).copy()
    return fields, {name: HostArray(data, part.dtype, data.shape)}


def earlier_state(draw, fields, parts):
    return {**fields, "start": fields["start"] - (fields["group"] < 0)}, parts


def dead(draw, fields, parts):
    raise ConnectionResetError("planted")


def late(draw, fields, parts):
    LINKS[-1].extend(time.monotonic() - 1)
    return fields, parts


FAULTS = {
    "stale ticket": (stale_ticket, "stale"),
    "other tokens": (other_tokens, "foreign"),
    "other group": (other_group, "damaged"),
    "shifted": (shifted, "foreign"),
    "truncated": (truncated, "damaged"),
    "earlier state": (earlier_state, "foreign"),
    "dead": (dead, "failed"),
    "late": (late, "expired"),
}


class Faulty:
    """Replaces ``Link.send`` of the prefilling engine; ``fault`` is in some spans."""

    def __init__(self, monkeypatch, draw, share=1.0):
        self.fault, self._draw, self._share = None, draw, share
        self.send = send = Link.send
        faulty = self

        def wrong(link, kind, fields, parts=None):
            if kind is Kind.SPAN and faulty.fault and draw.random() < faulty._share:
                fields, parts = faulty.fault(draw, fields, parts)
            send(link, kind, fields, parts)

        monkeypatch.setattr(Link, "send", wrong)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_arrive_is_computed(pair, alone, monkeypatch, fault, has_state):
    make, kind = FAULTS[fault]
    if fault == "earlier state" and not has_state:
        kind = "done"  # there is none
    faulty = Faulty(monkeypatch, Random(1))
    faulty.fault = make
    _, near = pair()
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts[kind] == 1
    assert near.remote_prefill.counts["done"] == (kind == "done")


class Wire(threading.Thread):
    """Carries one connection; flips a bit of a byte to the decoding engine, or ends."""

    def __init__(self, address, place, *, ends=False):
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.far = socket.create_connection(parse_address(address))
        self.place, self.ends = place, ends
        self.start()

    def run(self):
        near, _ = self.listening.accept()
        self.listening.close()
        upstream = threading.Thread(target=self.upstream, args=(near,), daemon=True)
        upstream.start()
        with near, self.far:
            self.downstream(near)
            for each in (near, self.far):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            upstream.join()

    def downstream(self, near):
        passed = 0
        with suppress(OSError):
            while data := bytearray(self.far.recv(4096)):
                at = self.place - passed
                if 0 <= at < len(data) and self.ends:
                    near.sendall(data[:at])
                    return
                if 0 <= at < len(data):
                    data[at] ^= 1
                near.sendall(data)
                passed += len(data)

    def upstream(self, near):
        with suppress(OSError):
            while data := near.recv(4096):
                self.far.sendall(data)
            self.far.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("place", [3, 10, 40, 75, 80, 130, 300, 600])
@pytest.mark.parametrize("ends", [False, True])
def test_a_wire_that_damages_or_ends_is_found(pair, alone, place, ends):
    far, near = pair()
    wire = Wire(far.prefill_port.address, place, ends=ends)
    near.remote_prefill._addresses = (wire.address,)
    near.remote_prefill._away[wire.address] = 0.0
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    counts = near.remote_prefill.counts
    wire.join()
    assert counts["done"] == 0
    assert counts["damaged"] + counts["failed"] == 1


blocks_only = pytest.mark.parametrize("has_state", ["blocks"], indirect=True)


@blocks_only
def test_a_reset_makes_a_ticket_stale(pair, alone, monkeypatch):
    faulty = Faulty(monkeypatch, Random(1))
    _, near = pair()

    def reset(draw, fields, parts):
        near.reset_prefix_cache()
        return fields, parts

    faulty.fault = reset
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["stale"] == 1


@pytest.mark.parametrize("spans", [1, 2, 4])
def test_a_process_that_is_killed_is_no_problem(engines, alone, spans, has_state):
    script = Path(__file__).with_name("prefill_process.py")
    child = subprocess.Popen(
        [sys.executable, str(script), str(spans), *["state"][: has_state]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        near = engines(
            runner=HashRunner(limits_of(4), recurrent=has_state), role="decode",
            kv_host="1MiB", kv_peer=child.stdout.readline().strip(),
        )  # fmt: skip
        handle = near.start(PROMPT, listener=None, **OPTIONS)
        assert child.stdout.readline() == "now\n"
        child.send_signal(signal.SIGKILL)
        found = handle.result()
    finally:
        child.kill()
        child.communicate()
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["failed"] == 1
    assert (near.remote_prefill.counts["blocks"] > 0) == (spans > 1)


def test_no_engine_is_no_problem(pair, alone):
    far, near = pair()
    far.close()
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["failed"] == 1


def test_engines_of_other_models_refuse(pair, alone):
    far, near = pair()
    far.prefill_port._identity = "other"
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["refused"] == 1


def test_the_secret_is_needed(pair, alone):
    far, near = pair()
    far.prefill_port._secret = b"\1" * 32
    found = near.generate(PROMPT, **OPTIONS)
    assert found.token_ids == alone.generate(PROMPT, **OPTIONS).token_ids
    assert near.remote_prefill.counts["failed"] == 1
    until(lambda: far.prefill_port.counts["failed"] == 1)


OUTCOMES = "done", "stale", "foreign", "damaged", "failed", "expired", "blocks"


def soak(pair, alone, monkeypatch, seed, requests, faults, outcomes=()):
    """Random prompts, of which peers send wrong contents, die or are late.

    More than ``requests`` if not each of ``outcomes`` has occurred: some depend on how
    the threads run.
    """
    draw, counts = Random(seed), Counter()
    faulty = Faulty(monkeypatch, draw, share=0.5)
    worlds = [pair(*sizes) for sizes in ((4, 4), (6, 4), (4, 16))]

    def has_all():
        seen = sum((near.remote_prefill.counts for _, near in worlds), Counter())
        return all(seen[name] for name in outcomes)

    for number in range(20 * requests):
        if number >= requests and has_all():
            break
        far, near = draw.choice(worlds)
        faulty.fault = draw.choice([None, *faults])
        family, length = draw.randrange(5), draw.randint(9, 60)
        prompt = [family * 40 + at % 23 for at in range(length)]
        options = {**OPTIONS, "seed": draw.randrange(9)}
        salt = draw.choice(["", "tenant"])
        found = near.generate(prompt, cache_salt=salt, **options)
        wanted = alone.generate(prompt, **options)
        assert found.token_ids == wanted.token_ids, "a text is wrong"
        counts["requests"] += 1
        counts["cached"] += found.cached_tokens > 0
        if draw.random() < 0.3:
            near.reset_prefix_cache()
        if draw.random() < 0.2:
            far.reset_prefix_cache()
    for _, near in worlds:
        counts.update(near.remote_prefill.counts)
    return counts


def test_random_prompts_over_wrong_peers(pair, alone, monkeypatch, depth, report):
    faults = [make for make, _ in FAULTS.values()]
    count = depth(60, 300, 5_000)
    counts = soak(pair, alone, monkeypatch, 1, count, faults, OUTCOMES)
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for name in OUTCOMES:
        assert counts[name], name


def test_contents_of_other_tokens_would_be_found(pair, alone, monkeypatch, has_state):
    """The soak finds a receiver that does not compare tokens."""
    monkeypatch.setattr(remote_prefill, "tokens_digest", lambda *_: "00" * 32)
    monkeypatch.setattr(span_messages, "tokens_digest", lambda *_: "00" * 32)
    fault = earlier_state if has_state else shifted
    with pytest.raises(AssertionError, match="a text is wrong"):
        soak(pair, alone, monkeypatch, 1, 300, [fault])


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "prefill"},
        {"role": "decode", "kv_peer": "a:1"},
        {"kv_peer": "a:1"},
        {"role": "router"},
    ],
)
def test_roles_that_lack_something_are_refused(engines, fields):
    with pytest.raises(RequestError, match=r"EngineConfig\.(role|kv_peer|kv_host)"):
        engines(**fields)


@blocks_only
def test_an_address_that_is_in_use_is_refused(pair, engines):
    far, _ = pair()
    with pytest.raises(DeviceError, match="kv_peer 127"):
        engines(role="prefill", kv_peer=far.prefill_port.address)
