"""Requests of a drained engine go on elsewhere with what it has computed of them."""

from __future__ import annotations

import json

import pytest

from fleets import LONG, TEXT, Fleet, HeldEngine
from http_servers import HashServer, SlowRunner, hash_engine
from inl.config import EngineConfig
from inl.engine import scheduler_setup, state_port
from inl.fleet import engine_port, membership, moving
from inl.serve.server import engine_config
from waiting import until

KEYS = {"admin_keys": ("operator",)}
ADMIN = {"authorization": "Bearer operator"}
REGEX = {"regex": "[a-z]{3}(one|two){2}[0-9]{150}"}
BODIES = {
    "greedy": {**LONG, "temperature": 0},
    "sampled": {**LONG, "temperature": 0.8, "frequency_penalty": 0.4},
    "grammar": {**LONG, "structured_outputs": REGEX, "ignore_eos": False},
    "several": {**LONG, "n": 2, "temperature": 0.8},
}
KINDS = {"blocks": False, "state": True}


@pytest.fixture(scope="module", params=KINDS)
def has_state(request):
    """Whether every token changes state of the model, beside its blocks."""
    found = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_setup, "is_recurrent", lambda _: found)
        yield found


class Engine(HeldEngine):
    """One engine, whose model may have state that every token changes."""

    has_state = False

    def _open(self, on_step):
        config = engine_config(EngineConfig(), self.config, self._max_batch)
        self.engine = hash_engine(
            self._max_batch, config=config, on_step=on_step,
            kind=lambda limits: SlowRunner(limits, recurrent=self.has_state),
        )  # fmt: skip
        return self.engine


class Alone(Engine):
    make = HashServer.make


@pytest.fixture(scope="module")
def started(has_state):
    Engine.has_state = has_state  # they are made in threads of their own
    with (
        Alone(max_batch=8) as alone,
        Engine(max_batch=8) as one,
        Engine(max_batch=8) as two,
    ):
        yield alone, [one, two]


@pytest.fixture
def servers(started, monkeypatch):
    """An engine alone, and two of a fleet; none has a cached prefix."""
    # The other engine waits for the export, however slow this machine is.
    monkeypatch.setattr(membership, "EXPORT_SECONDS", 300.0)
    monkeypatch.setattr(state_port, "SECONDS", 300.0)
    alone, engines = started
    for each in (alone, *engines):
        each.engine.reset_prefix_cache()
        each.engine.core.scheduler._requests.prefix_hit_tokens = 0
    return started


def drained(fleet, engines, body):
    """Tokens of a stream whose engine is drained at once, and both engines."""
    found = []

    def drain():
        busy = fleet.engine_of(engines)
        (other,) = (each for each in engines if each is not busy)
        found.extend((busy, other))
        fields = {"address": busy.address, "seconds": 0}
        status, _, answer = fleet.send("POST", "/fleet/drain", fields, ADMIN)
        assert status == 200, answer
        # The export waits for the step that the engine holds, if it is not done yet.
        lock = busy.engine._dispatcher.lock
        until(lambda: lock.waiters > 0 or fleet.counts["exported"])

    for each in engines:
        held(each)
    lines = fleet.disturbed(engines, TEXT, body, drain)
    return by_choice(lines), *found


def answers(server, body):
    """Tokens of each completion, of an engine that nothing happens to."""
    status, _, found = server.send("POST", TEXT, body)
    assert status == 200, found
    return {each["index"]: each["token_ids"] for each in found["choices"]}


def held(engine):
    """Let a test hold steps of an engine as those of a process."""
    engine.hold = lambda: engine.gate.hold_after(12)
    engine.release = lambda: engine.gate.release()


def by_choice(lines):
    datas = [line.removeprefix("data: ") for line in lines if line[6:7] == "{"]
    tokens: dict[int, list[int]] = {}
    for choice in (each for data in datas for each in json.loads(data)["choices"]):
        ids = tokens.setdefault(choice["index"], [])
        ids += choice.get("token_ids") or ()
    return tokens


def ready(fleet):
    until(lambda: all(each.state.value == "ready" for each in fleet.client.engines))


@pytest.mark.parametrize("name", BODIES)
def test_a_request_goes_on_with_what_was_computed(servers, name, has_state):
    alone, engines = servers
    wanted = answers(alone, BODIES[name])
    with Fleet([each.address for each in engines], config=KEYS) as fleet:
        ready(fleet)
        found, busy, other = drained(fleet, engines, BODIES[name])
        assert found == wanted
        count = len(wanted)
        assert fleet.counts["exported"] == count
        assert not fleet.counts["lost"] + fleet.counts["failed"]
        assert fleet.client.open_requests(fleet_link(fleet, busy)) == 0
    # 100 tokens of the prompt and some of the output; all but the last with state.
    least = 100 if has_state else 96
    assert other.engine.core.stats.prefix_hit_tokens >= count * least
    assert busy.engine.core.has_work is False


def fleet_link(fleet, engine):
    (link,) = (x for x in fleet.client.engines if x.address == engine.address)
    return link


def wrong_ticket(address, secret, ticket, tokens):
    return state_port.take_contents(address, secret, "00" * 16, tokens)


def other_tokens(address, secret, ticket, tokens):
    return state_port.take_contents(address, secret, ticket, tokens[::-1])


def wrong_secret(address, secret, ticket, tokens):
    return state_port.take_contents(address, b"\1" * 32, ticket, tokens)


@pytest.mark.parametrize("take", [wrong_ticket, other_tokens, wrong_secret])
def test_what_does_not_arrive_is_computed_again(servers, monkeypatch, take):
    monkeypatch.setattr(moving, "take_contents", take)
    alone, engines = servers
    wanted = answers(alone, BODIES["sampled"])
    with Fleet([each.address for each in engines], config=KEYS) as fleet:
        ready(fleet)
        found, _, other = drained(fleet, engines, BODIES["sampled"])
        assert found == wanted
        assert fleet.counts["exported"] == 1
    assert other.engine.core.stats.prefix_hit_tokens == 0


def test_an_engine_that_ends_lets_others_take_its_requests(servers, monkeypatch):
    monkeypatch.setattr(engine_port, "EXPORT_SECONDS", 300.0)
    alone, (other, _) = servers
    wanted = answers(alone, BODIES["sampled"])
    with (
        Engine(max_batch=8, drain_seconds=0.0) as ending,
        Fleet([ending.address], config=KEYS) as fleet,
    ):
        ready(fleet)

        def end():
            fleet.add(other.address)
            until(lambda: fleet.client.members.has_other(fleet_link(fleet, ending)))
            ending.stop()
            lock = ending.engine._dispatcher.lock
            until(lambda: lock.waiters > 0 or fleet.counts["exported"])

        held(ending)
        lines = fleet.disturbed([ending], TEXT, BODIES["sampled"], end)
        assert by_choice(lines) == wanted
        assert fleet.counts["exported"] == 1
    assert other.engine.core.stats.prefix_hit_tokens >= 96


def test_an_export_that_takes_too_long_is_not_waited_for(servers, monkeypatch):
    monkeypatch.setattr(membership, "EXPORT_SECONDS", 0.0)
    alone, engines = servers
    wanted = answers(alone, BODIES["greedy"])
    with Fleet([each.address for each in engines], config=KEYS) as fleet:
        ready(fleet)
        found, _, _ = drained(fleet, engines, BODIES["greedy"])
        assert found == wanted
