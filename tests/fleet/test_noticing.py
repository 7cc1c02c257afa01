"""When an engine is found silent, and that one that computes is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import fleets
from fleets import SLOW, EngineProcess, Fleet
from inl.fleet import engine_link
from inl.fleet.client import FleetClient
from inl.fleet.engine_link import EngineLink, State
from inl.serve.frontends.messages import Leave, ModelSettings, Ping, Pong, Replica
from inl.serve.settings import ServerConfig
from waiting import until

MODEL = ModelSettings("m", (), None, 1024)
DESCRIBED = Replica(b"", [MODEL], {"model": "m"}, "cpu:0", 4, 4096, 1024, {}, [0])


class Answering:
    """The connection to an engine that answers some signs of life, and then none."""

    transport = None

    def __init__(self, engine, answers):
        self.received_bytes, self.pings = 0, 0
        self._engine, self._answers = engine, answers

    def send(self, message):
        if isinstance(message, Ping):
            self.pings += 1
            if self.pings <= self._answers:
                self.received_bytes += 1
                self._engine._receive_open(Pong())

    def abort(self):
        pass


@pytest.mark.parametrize(
    ("late_seconds", "beats"), [(0, 5), (0.1, 5), (0.16, 7), (9, 8)]
)
def test_an_engine_is_silent_after_some_beats_and_more_if_it_was_late(
    monkeypatch, late_seconds, beats
):
    monkeypatch.setattr(EngineLink, "_judge", fleets.JUDGE)
    monkeypatch.setattr(engine_link, "LATE_DECAY", 1)

    async def check():
        client = FleetClient(ServerConfig())
        engine = EngineLink("127.0.0.1:1", None, client)
        link = engine._link = Answering(engine, 12)
        client.engines.append(engine)
        engine._open(DESCRIBED)
        engine._late_seconds = late_seconds
        monkeypatch.setattr(engine_link, "BEAT_SECONDS", 0.001)
        # Beats are counted here, whose time has another unit.
        monkeypatch.setattr(
            engine_link, "LATE_TIMES", engine_link.LATE_TIMES * 0.001 / 0.1
        )
        silent = asyncio.Event()
        judge = engine._engines.changed

        def changed(found):
            judge(found)
            if found.state is State.SILENT:
                silent.set()

        client.changed = changed
        watching = asyncio.create_task(engine._watch())
        await silent.wait()
        watching.cancel()
        await asyncio.wait([watching])
        # The answer of ping 12 was seen at the next beat.
        assert link.pings == 12 + 1 + beats

    asyncio.run(check())


def test_the_time_of_a_loss_is_below_a_second():
    beats = engine_link.MOST_SILENT_BEATS + 1
    assert beats * engine_link.BEAT_SECONDS < 1
    assert (engine_link.SILENT_BEATS + 1) * engine_link.BEAT_SECONDS < 0.7


def test_late_answers_are_remembered_and_forgotten(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(engine_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = EngineLink("127.0.0.1:1", None, FleetClient(ServerConfig()))
    engine.state = State.READY
    engine._pinged_at = 1.0
    now[0] = 1.18
    engine._receive_open(Pong())
    assert engine._patience() == 8
    engine._late_seconds *= engine_link.LATE_DECAY**70
    assert engine._patience() == 5
    # A stopped engine was not late.
    engine.state, engine._pinged_at, now[0] = State.SILENT, 1.0, 30.0
    engine._receive_open(Pong())
    assert engine._patience() == 5


def test_an_engine_whose_step_takes_long_answers_all_the_while():
    """Stopped and busy are told apart: what answers is not what computes."""
    with EngineProcess(**SLOW) as busy, Fleet([busy.address]) as fleet:
        busy.hold()
        stream = fleet.stream(fleets.TEXT, fleets.LONG)
        next(stream)
        fleet.until_begun()
        link = fleet.client.engines[0]._link
        before = link.received_bytes
        # No token arrives any more, but one byte after the other.
        tokens = [len(each.handle.token_ids) for each in fleet.parts]
        for _ in range(engine_link.MOST_SILENT_BEATS + 2):
            until(lambda at=link.received_bytes: link.received_bytes > at)
        assert link.received_bytes - before < 1000
        found = [len(each.handle.token_ids) for each in fleet.parts]
        assert max(found) - max(tokens) <= 12
        assert fleet.client.engines[0].state is State.READY
        busy.stop()
        until(lambda: fleet.client.engines[0].state is State.SILENT)
        busy.go_on()
        busy.release()
        until(lambda: fleet.client.engines[0].state is State.READY)
        assert len(fleets.ids_of(list(stream))) > 0


def test_the_end_of_an_answered_request_goes_with_the_next_message_or_soon():
    async def check():
        engine = EngineLink("127.0.0.1:1", None, FleetClient(ServerConfig()))
        sent, is_late = [], asyncio.Event()

        def send(message):
            sent.append(message)
            if message == Leave(3, True):
                is_late.set()

        engine._link = SimpleNamespace(send=send)
        engine.leave(Leave(1, True))
        engine.leave(Leave(2, True))
        assert sent == []
        engine.send(Ping())
        assert sent == [Ping(), Leave(1, True), Leave(2, True)]
        engine.leave(Leave(3, True))
        await is_late.wait()
        assert sent[3:] == [Leave(3, True)]

    asyncio.run(check())
