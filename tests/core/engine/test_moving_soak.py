"""Random requests that move over connections, between engines that die.

A client continues a request of a dead engine from its prompt and the tokens that have
arrived. Texts are those of staying.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from inl.engine import state_port
from inl.engine.moved_request import moved_request
from inl.engine.state_port import StatePort, take_contents
from inl.errors import InlError, RequestError
from inl.kv_transfer import link, span_messages
from inl.kv_transfer.link import Kind, Link
from inl.testing.hash_runner import HashRunner
from moved_draws import OPTIONS, limits_of, prompt_of

LIMITS = [limits_of(4), limits_of(16), limits_of(6)]
FATES = ("arrives", "arrives", "shuffled", "flipped", "cut off", "used", "dies")
"""What becomes of the contents of a request on their way."""


class Place:
    """An engine and its port, which are replaced when they die."""

    def __init__(self, engines, limits, seed):
        runner = HashRunner(limits, lag=Random(seed))
        self.engine = engines(runner=runner, kv_host="1MiB")
        self.port = StatePort("127.0.0.1:0", None)

    def die(self):
        self.port.close()
        self.engine.close()


class Flaw:
    """Changes what connections carry."""

    def __init__(self, monkeypatch, draw):
        self.fate = ""
        write, send = Link._write, Link.send

        def flipped(sent, data):
            if self.fate == "flipped" and isinstance(data, memoryview):
                changed = bytearray(data)
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
                data = bytes(changed)
            write(sent, data)

        def cut_off(sent, kind, fields, parts=None):
            if self.fate == "cut off" and kind is Kind.DONE:
                raise ConnectionResetError("planted")
            send(sent, kind, fields, parts)

        monkeypatch.setattr(Link, "_write", flipped)
        monkeypatch.setattr(Link, "send", cut_off)


class World:
    """Engines, and the requests of one client."""

    def __init__(self, engines, monkeypatch, seed):
        self.draw, self.counts, self.live = Random(seed), Counter(), []
        self.engines, self.flaw = engines, Flaw(monkeypatch, Random(seed + 1))
        self.places = [Place(engines, limits, seed) for limits in LIMITS]
        runner = HashRunner(LIMITS[0])
        self.alone = engines(runner=runner, prefix_cache=False)

    def add(self):
        draw = self.draw
        options = {"seed": draw.randrange(99), "max_tokens": draw.randint(1, 24)}
        options |= draw.choice(OPTIONS)
        prompt, at = prompt_of(draw), draw.randrange(len(self.places))
        handle = self.places[at].engine.submit(prompt, **options)
        self.live.append({"handle": handle, "at": at, "asked": (prompt, options)})

    def move(self, request):
        """Move a request to another place, over the port of its own."""
        far, fate = self.places[request["at"]], self.draw.choice(FATES)
        if fate == "dies":
            self.die(request["at"])
            return
        try:
            moved = far.engine.export_request(request["handle"])
        except RequestError:
            return  # its last step was in flight
        ticket = far.port.hold(moved)
        tokens = [*moved.prompt_ids, *moved.output_ids]
        moved = replace(moved, spans=(), identity="")
        if ticket and fate == "used":
            take_contents(far.port.address, None, ticket, tokens)
        try:
            self.flaw.fate = fate
            found = take_contents(far.port.address, None, ticket, tokens)
        except (OSError, InlError) as error:
            self.counts[f"{fate}: {type(error).__name__}"] += 1
        else:
            parts = list(found.spans)
            if fate == "shuffled":
                self.draw.shuffle(parts)
            moved = replace(moved, spans=parts, identity=found.identity)
            self.counts[f"{fate}: taken"] += 1
        finally:
            self.flaw.fate = ""
        self.go_on(request, moved)

    def die(self, at):
        """Replace an engine; its requests go on from what the client has of them."""
        place = self.places[at]
        lost = [request for request in self.live if request["at"] == at]
        lost = [request for request in lost if not request["handle"].completed]
        model = place.engine.core.config.model_digest
        known = [
            moved_request(each["handle"], (), model=model, identity="") for each in lost
        ]
        self.counts["hits"] += place.engine.tiers.hits["host"]
        place.die()
        limits, seed = LIMITS[at], self.draw.randrange(99)
        self.places[at] = Place(self.engines, limits, seed)
        self.counts["engines died"] += 1
        for request, moved in zip(lost, known, strict=True):
            self.go_on(request, moved)

    def go_on(self, request, moved):
        others = [at for at in range(len(self.places)) if at != request["at"]]
        request["at"] = self.draw.choice(others)
        engine = self.places[request["at"]].engine
        request["handle"] = engine.import_request(moved)
        self.counts["moves"] += 1

    def step(self):
        draw = self.draw
        if len(self.live) < 5 and draw.random() < 0.3:
            self.add()
        if self.live and draw.random() < 0.15:
            request = draw.choice(self.live)
            if not request["handle"].completed:
                self.move(request)
        draw.choice(self.places).engine.step()
        for request in [each for each in self.live if each["handle"].completed]:
            self.finish(request)

    def finish(self, request):
        self.live.remove(request)
        prompt, options = request["asked"]
        found = request["handle"].completion()
        wanted = self.alone.generate(prompt, **options)
        for name in ("text", "token_ids", "finish_reason", "logprobs", "seed"):
            assert getattr(found, name) == getattr(wanted, name), name
        self.counts["requests"] += 1

    def close(self):
        for place in self.places:
            place.port.close()
            self.counts["hits"] += place.engine.tiers.hits["host"]


def soak(engines, monkeypatch, seed, steps):
    world = World(engines, monkeypatch, seed)
    try:
        for _ in range(steps):
            world.step()
    finally:
        world.close()
    return world.counts


@pytest.fixture(autouse=True)
def lasting(patient_links, monkeypatch):
    monkeypatch.setattr(state_port, "SECONDS", 300.0)


@pytest.mark.timeout(7200)
def test_tokens_are_those_of_staying(engines, monkeypatch, depth, report):
    counts = soak(engines, monkeypatch, 4, depth(600, 4_000, 100_000))
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for name in (
        "moves", "engines died", "hits", "arrives: taken", "shuffled: taken",
        "flipped: ProtocolError", "cut off: ConnectionResetError",
        "used: ProtocolError",
    ):  # fmt: skip
        assert counts[name] > 2, name
    assert not counts["flipped: taken"]


def believes(own, theirs):
    return True


def any_tokens(tokens, stop):
    return "0"


def any_contents(self, moved):
    """Holds the contents of an earlier request under the ticket of each."""
    kept = self.__dict__.setdefault("_kept", [])
    kept.append(moved)
    return hold(self, replace(moved, spans=kept[max(len(kept) - 2, 0)].spans))


hold = StatePort.hold
FAULTS = {
    "a wrong byte is accepted": [(link.hmac, "compare_digest", believes)],
    "contents of other tokens are accepted": [
        (StatePort, "hold", any_contents),
        (state_port, "tokens_digest", any_tokens),
        (span_messages, "tokens_digest", any_tokens),
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(engines, monkeypatch, fault):
    for where, name, wrong in FAULTS[fault]:
        monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError, match=r"text|token_ids"):
        soak(engines, monkeypatch, 4, 3_000)
