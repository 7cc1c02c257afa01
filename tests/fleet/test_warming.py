"""An engine that joins computes recent prompts before it gets requests."""

from __future__ import annotations

import asyncio

import pytest

from inl.fleet.client import FleetClient
from inl.fleet.engine_link import EngineLink, State
from inl.fleet.warming import WARM_PROMPTS
from inl.serve.frontends.messages import (
    Answered,
    End,
    Failure,
    Leave,
    ModelSettings,
    News,
    Replica,
    Submit,
)
from inl.serve.settings import ServerConfig

MODEL = ModelSettings("m", (), None, 1024)
DESCRIBED = Replica(b"", [MODEL], {"model": "m"}, "cpu:0", 4, 4096, 1024, {}, [0])


class Engine(EngineLink):
    """A link that keeps what it sends."""

    def __init__(self, number, client):
        super().__init__(f"127.0.0.1:{number}", None, client)
        self.sent = []
        client.engines.append(self)

    def send(self, message):
        self.sent.append(message)

    def begin(self):
        self._open(DESCRIBED)

    def submitted(self):
        return [each for each in self.sent if isinstance(each, Submit)]

    def end(self, client, number):
        end = End(number, "length", False, None, None)
        client.received(self, News([number], [[7]], [(number, 0)], [], [end]))


def call(number, prompt, **options):
    return Submit(number, "m", "key", [prompt], options, 1, None, "request")


@pytest.fixture
def client():
    return FleetClient(ServerConfig())


def prompts_of(engine):
    return [each.prompts[0] for each in engine.submitted()]


def test_it_is_ready_once_it_has_computed_them(client):
    async def run():
        one, two = Engine(1, client), Engine(2, client)
        one.begin()
        assert one.state is State.READY, "there is nothing to compute"
        prompts = [[number] * 100 for number in range(WARM_PROMPTS + 1)]
        for number, prompt in enumerate(prompts):
            client.warming.remember(call(number, prompt, cache_salt=f"salt {number}"))
            client.warming.remember(call(number, [*prompt[:64], 5]))  # begins alike
        two.begin()
        assert two.state is State.WARMING
        await asyncio.sleep(0.01)
        assert prompts_of(two) == prompts[1:]
        for message in two.submitted():
            assert message.options["max_tokens"] == 1
            assert message.options["cache_salt"] == f"salt {message.prompts[0][0]}"
        for _ in range(20):
            chosen = client.router.choose([], 100)[0]
            assert chosen == one.number
        *numbers, last = [message.first for message in two.submitted()]
        for number in numbers:
            two.end(client, number)
        await asyncio.sleep(0.01)
        assert two.state is State.WARMING
        # One that is refused counts as well.
        failure = Failure(503, "full")
        client.received(two, Answered(last, failure))
        await asyncio.sleep(0.01)
        assert two.state is State.READY
        assert len([each for each in two.sent if isinstance(each, Leave)]) == 8
        assert not client.warming.open
        assert client.router.choose([], 100, {one.number})[0] == two.number

    asyncio.run(run())


def test_it_does_not_wait_if_no_other_one_is_left(client):
    async def run():
        one, two = Engine(1, client), Engine(2, client)
        one.begin()
        client.warming.remember(call(0, [1, 2, 3]))
        two.begin()
        assert two.state is State.WARMING
        one._fail("has closed its connection")
        one._close()
        assert two.state is State.READY
        await asyncio.sleep(0.01)

    asyncio.run(run())


def test_prompts_with_images_are_not_remembered(client):
    client.warming.remember(call(0, [1, 2, 3], images=["data"]))
    assert not client.warming.recent
