"""``Last-Event-ID``: streams go on behind other connections, front-ends and engines."""

from __future__ import annotations

import json
from contextlib import ExitStack
from random import Random

import pytest

from depth import SEED, scaled
from fleets import EngineProcess, Fleet
from http_servers import HashServer, ServerProcess
from inl.serve.frontends.transcripts import ENTRY_TOKENS, Transcripts
from inl.serve.resuming import last_event_id
from stream_requests import QUICK, REQUESTS, TEXT, joined
from waiting import until

SLOW = {"max_batch": 8, "seconds": 0.01}
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
    for name in REQUESTS
]
LONG = {"prompt": list(range(80)), "seed": 3, "max_tokens": 200, "ignore_eos": True}
LONG |= {"stream_options": {"include_usage": True}, "return_token_ids": True}


def request_of(name):
    path, body = REQUESTS[name]
    if "messages" in body or path == TEXT:
        body = {**body, "stream_options": {"include_usage": True}}
    return path, {
        k: v for k, v in body.items() if path != "/v1/messages" or k != "stream_options"
    }


def events_of(fleet, path, body, last=None, headers=()):
    """Yield (id, data) of the events of a stream."""
    number = None
    headers = dict(headers) | ({} if last is None else {"Last-Event-ID": last})
    for line in fleet.stream(path, body, headers=headers):
        if line.startswith("id: "):
            number = line.removeprefix("id: ")
        if line.startswith("data: "):
            yield number, line.removeprefix("data: ")
            number = None


def lines_of(events):
    return [f"data: {data}" for _, data in events]


def tokens_of(number):
    """Return how many tokens of each completion an event was written from."""
    found = last_event_id([(b"last-event-id", number.encode())])
    return found.seen.tokens


def read(fleet, path, body, count, last=None, headers=()):
    """Return the first events of a stream, whose connection is then closed."""
    events = events_of(fleet, path, body, last, headers)
    found = [each for each, _ in zip(events, range(count), strict=False)]
    events.close()
    return found


def ready(fleet, count):
    until(lambda: fleet.send("GET", "/ready")[0] == 200)
    until(
        lambda: (
            [each["state"] for each in fleet.send("GET", "/load")[2]["replicas"]]
            == ["ready"] * count
        )
    )


@pytest.fixture(scope="module")
def engine():
    with EngineProcess(max_batch=8) as engine:
        yield engine


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_goes_on_behind_any_of_its_events(name, engine):
    path, body = request_of(name)
    draw = Random(SEED)
    with Fleet([engine.address]) as first, Fleet([engine.address]) as other:
        whole = list(events_of(first, path, body))
        numbers = [number for number, _ in whole]
        assert all(numbers)
        assert len(set(numbers)) == len(whole)
        wanted = joined(lines_of(whole))
        places = [0, 1, len(whole) - 2, len(whole) - 1]
        places += [draw.randrange(2, len(whole)) for _ in range(scaled(4, 10, 400))]
        for place in places:
            rest = list(events_of(other, path, body, numbers[place]))
            assert joined(lines_of([*whole[: place + 1], *rest])) == wanted, place
            assert all(number not in numbers[: place + 1] for number, _ in rest)
        # Behind the opening, nothing had been generated yet.
        generated = [place for place in places if any(tokens_of(numbers[place]))]
        assert other.counts["resumed"] == len(generated) > 0
        # The last answer has been sent before its place is free.
        until(lambda: not other.client.admission.open)
        assert not other.counts["diverged"]


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_is_cut_off_again_and_again_has_every_event_once(name, engine):
    path, body = request_of(name)
    draw = Random(SEED)
    with (
        HashServer(max_batch=8) as plain,
        Fleet([engine.address]) as first,
        Fleet([engine.address]) as other,
    ):
        lines = plain.send("POST", path, {**body, "stream": True})[2].decode()
        last, found = None, []
        while found[-1:] != ["end"]:
            count = draw.randrange(1, 60)
            fleet = draw.choice([first, other])
            part = read(fleet, path, body, count, last)
            found += part if len(part) == count else [*part, "end"]
            last = part[-1][0] if part else last
        assert joined(lines_of(found[:-1])) == joined(lines.splitlines())
        assert len({number for number, _ in found[:-1]}) == len(found) - 1


def test_events_of_responses_keep_their_numbers_and_names(engine):
    path, body = request_of("responses")
    with Fleet([engine.address]) as first, Fleet([engine.address]) as other:
        whole = list(events_of(first, path, body))
        begun = whole[: len(whole) // 2]  # tokens that come at once are one event
        rest = list(events_of(other, path, body, begun[-1][0]))
        found = [json.loads(data) for _, data in [*begun, *rest]]
        assert [each["sequence_number"] for each in found] == list(range(len(found)))
        ids = {each["response"]["id"] for each in found if "response" in each}
        assert len(ids) == 1
        # It can be continued as any other.
        status, _, answer = other.send("GET", f"/v1/responses/{ids.pop()}")
        assert status == 200
        assert answer["output"] == found[-1]["response"]["output"]


def test_tool_calls_keep_their_ids(engine):
    path, body = request_of("tools")
    with Fleet([engine.address]) as fleet:
        whole = list(events_of(fleet, path, body))
        found = list(events_of(fleet, path, body, whole[0][0]))

        def ids(events):
            parts = [json.loads(data) for _, data in events if data != "[DONE]"]
            deltas = [each["delta"] for part in parts for each in part["choices"]]
            calls = [call for each in deltas for call in each.get("tool_calls", ())]
            return [call["id"] for call in calls if "id" in call]

        assert ids(found) == ids(whole)
        assert ids(found)


def test_a_stream_goes_on_after_its_engine_is_lost_with_what_it_knew():
    with EngineProcess(**SLOW) as one, EngineProcess(**SLOW) as two:
        engines = [one, two]
        with Fleet([each.address for each in engines]) as fleet:
            ready(fleet, 2)
            whole = list(events_of(fleet, TEXT, LONG))
            begun = []
            for each in engines:
                each.hold()
            for event in events_of(fleet, TEXT, LONG):
                begun.append(event)
                if any(tokens_of(event[0])):
                    fleet.engine_of(engines).kill()
                    break
            for each in engines:
                each.release()
            rest = list(events_of(fleet, TEXT, LONG, begun[-1][0]))
            assert joined(lines_of([*begun, *rest])) == joined(lines_of(whole))


def test_what_an_engine_remembers_is_not_generated_again(engine):
    with Fleet([engine.address]) as fleet:
        whole = list(events_of(fleet, TEXT, LONG))
        before = fleet.client.router.prompt_tokens
        tokens = fleet.send("GET", "/load")[2]
        list(events_of(fleet, TEXT, LONG, whole[-3][0]))
        # One assignment: nothing was generated to find the tokens.
        assert fleet.client.router.prompt_tokens - before <= 80 + 200
        assert tokens["continued"] == 0


def test_every_front_end_may_end_and_start_again():
    with EngineProcess(**SLOW) as engine, ExitStack() as stack:
        first = stack.enter_context(Fleet([engine.address]))
        whole = list(events_of(first, TEXT, LONG))
        options = ("--replica", engine.address)
        killed = ServerProcess(*options).__enter__()
        begun = read(_Url(killed.url), TEXT, LONG, 40)
        killed.process.kill()
        with pytest.raises(AssertionError):  # its status is that of a killed one
            killed.__exit__()
        with ServerProcess(*options) as server:
            rest = list(events_of(_Url(server.url), TEXT, LONG, begun[-1][0]))
        assert joined(lines_of([*begun, *rest])) == joined(lines_of(whole))


class _Url(Fleet):
    """A server that runs already."""

    def __init__(self, url):
        self.url = url


def test_an_id_is_of_one_key_one_body_and_one_model(engine):
    keys = {"config": {"api_keys": ("one", "two")}}
    swapped = {"config": {"api_keys": ("two", "one")}}
    mine, others = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

    def answer(fleet, body, last, headers):
        data = {**body, "stream": True}
        headers = {**headers, "Last-Event-ID": last}
        return fleet.send("POST", TEXT, data, headers)[0]

    with (
        Fleet([engine.address], **keys) as first,
        Fleet([engine.address], **swapped) as other,
        EngineProcess(config={"kv_dtype": "int8"}) as changed,
        Fleet([changed.address], **keys) as rolled,
        HashServer(**keys["config"]) as plain,
    ):
        last = read(first, TEXT, LONG, 30, headers=mine)[-1][0]
        assert answer(first, LONG, last, mine) == 200
        assert answer(other, LONG, last, mine) == 200
        for fleet in (first, other):
            assert answer(fleet, LONG, last, others) == 409
            assert answer(fleet, {**LONG, "seed": 4}, last, mine) == 409
            assert answer(fleet, LONG, "?", mine) == 400
            assert answer(fleet, LONG, last[:-1] + "x", mine) == 400
            assert answer(fleet, LONG, "A" + last[1:], mine) in (400, 409)
        assert answer(rolled, LONG, last, mine) == 409
        assert answer(plain, LONG, last, mine) == 409
        head, _, _ = last.partition(".")
        for seen in (
            "0.0",
            "7.99999",
            "7.0-0",
            "7.5f",
            "3.1.0~3~1",
            "1.0.o~9",
            "1.0.c~9",
        ):
            assert answer(first, LONG, f"{head}.{seen}", mine) in (200, 400, 409)
        assert answer(first, LONG, f"{head}.7.99999", mine) == 409


def test_requests_of_many_completions_have_no_ids(engine):
    body = {"prompt": [[5, 6, 7]] * 9, "n": 2, "max_tokens": 3}
    with Fleet([engine.address]) as fleet:
        assert not any(number for number, _ in events_of(fleet, TEXT, body))


class _Item:
    """A completion."""

    def __init__(self, tokens):
        self.handle = self.first_request = self
        self.token_ids, self.cached_tokens = list(range(tokens)), tokens


def test_outputs_without_tokens_are_bounded_too():
    found = Transcripts(max_tokens=20 * ENTRY_TOKENS, seconds=10)
    for number in range(100):
        item = _Item(0)
        found.begin(bytes([number]), 0, item)
        found.end(bytes([number]), 0, item)
    assert len(found) == 20


def test_outputs_are_remembered_for_a_time_and_up_to_a_size():
    now = 0.0
    found = Transcripts(max_tokens=250, seconds=10, clock=lambda: now)

    def remember(name, tokens):
        item = _Item(tokens)
        found.begin(name, 0, item)
        assert found.find(name, 1) == ([item.token_ids], [tokens])
        found.end(name, 0, item)

    for number in range(5):
        remember(bytes([number]), 40)
    assert (len(found), found.tokens) == (2, 2 * (40 + ENTRY_TOKENS))
    assert found.find(b"\x03", 2) == ([list(range(40)), []], [40, 0])
    assert found.find(b"\x02", 1) == ([[]], [0])
    now = 11
    assert found.find(b"\x04", 1) == ([[]], [0])
    assert (len(found), found.tokens) == (0, 0)
    # Of two connections with the same stream, the newer one counts.
    old, new = _Item(5), _Item(7)
    found.begin(b"x", 0, old)
    found.begin(b"x", 0, new)
    found.end(b"x", 0, old)
    assert len(found.find(b"x", 1)[0][0]) == 7
    found.end(b"x", 0, new)
    assert found.tokens == 7 + ENTRY_TOKENS
