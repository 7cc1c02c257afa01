"""Streams go on token for token when engines are killed, stopped or cut off."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleets import EngineProcess, Fleet
from http_servers import HashServer
from waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "Name three rivers."}]
LONG = {"ignore_eos": True, "max_tokens": 240, "return_token_ids": True}

CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 60}}}
CITY |= {"required": ["city"], "additionalProperties": False}

REQUESTS = {
    "greedy": (TEXT, {"prompt": [5, 6, 7], "temperature": 0, **LONG}),
    "sampled": (TEXT, {"prompt": list(range(70)), "seed": 3, **LONG}),
    "penalties": (TEXT, {"prompt": [5, 6, 7], "seed": 4, "frequency_penalty": 0.5}
                  | {"repetition_penalty": 1.2, **LONG}),
    "logprobs": (TEXT, {"prompt": [5, 6, 7, 8], "seed": 5, "logprobs": 2}
                 | LONG),
    "samples": (TEXT, {"prompt": [[9, 8, 7], [5, 5]], "seed": 6, "n": 2, **LONG}),
    "bans": (TEXT, {"prompt": [5, 6], "seed": 7, "min_tokens": 200, "max_tokens": 240}),
    "chat": (CHAT, {"messages": TALK, "seed": 8, "max_tokens": 240, "min_tokens": 240}),
    "schema": (CHAT, {"messages": TALK, "seed": 9, "max_tokens": 240}
               | {"response_format": {"type": "json_schema", "json_schema":
                  {"name": "city", "schema": CITY}}}),
    "messages": ("/v1/messages", {"model": "hash", "messages": TALK}
                 | {"max_tokens": 240, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "Rivers?", "max_output_tokens": 240}
                  | {"temperature": 0}),
}  # fmt: skip

TOOL = {"type": "function", "function": {"name": "visit", "parameters": CITY}}
REQUESTS["tools"] = (
    CHAT,
    {"messages": TALK, "seed": 10, "max_tokens": 240, "tools": [TOOL]}
    | {"tool_choice": {"type": "function", "function": {"name": "visit"}}},
)

QUICK = ("sampled", "penalties", "logprobs", "samples", "schema", "messages")

CHANGING = {"id", "item_id", "created", "created_at", "completed_at", "call_id"}
CHANGING |= {"response_id"}


def parsed(lines):
    """Return the events of a stream without what differs between two equal ones."""

    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [without_names(json.loads(data)) for data in datas if data != "[DONE]"]


TEXTS = ("content", "text", "delta", "arguments", "partial_json", "reasoning_content")
COUNTED = ("prompt_tokens", "completion_tokens", "output_tokens", "finish_reason")
COUNTED += ("stop_reason", "total_tokens")

LISTS = ("choices", "output", "content", "tool_calls")
"""Their items have an index, by which parts belong together."""


def joined(lines):
    """Return what a stream says, however its text is divided into events."""
    texts, lists, ends = {}, {}, []

    def add(value, path):
        if isinstance(value, dict):
            for name, item in value.items():
                add(item, (*path, name))
        elif isinstance(value, list) and path[-1] in LISTS:
            for item in value:
                at = item.get("index") if isinstance(item, dict) else None
                add(item, (*path, at))
        elif isinstance(value, list):
            lists[path] = lists.get(path, []) + value
        elif path[-1] in TEXTS and isinstance(value, str):
            texts[path] = texts.get(path, "") + value
        elif path[-1] in COUNTED and value is not None:
            ends.append((path, value))

    for event in parsed(lines):
        add(event, (event.get("type"),))
    assert texts
    assert ends
    return texts, lists, sorted(map(repr, ends))


@pytest.fixture(scope="module")
def plain():
    """The engine's own server, whose answers are the right ones."""
    with HashServer(max_batch=8) as server:
        yield server


@pytest.fixture
def engines():
    options = {"max_batch": 8, "seconds": 0.01}
    with EngineProcess(**options) as one, EngineProcess(**options) as two:
        yield [one, two]


def undisturbed(plain, path, body):
    status, _, text = plain.send("POST", path, {**body, "stream": True})
    assert status == 200, text
    return text.decode().splitlines()


def disturbed(fleet, path, body, disturb, after=12):
    """Return the lines of a stream that something happens to after some events."""
    lines = []
    for line in fleet.stream(path, body):
        lines.append(line)
        if len(lines) == after:
            disturb()
    return lines


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
        for name in REQUESTS
    ],
)
def test_a_stream_of_a_killed_engine_goes_on_as_if_nothing_had_happened(
    name, plain, engines
):
    path, body = REQUESTS[name]
    if path == TEXT:
        body = {**body, "stream_options": {"include_usage": True}}
    wanted = joined(undisturbed(plain, path, body))
    with Fleet([each.address for each in engines]) as fleet:
        until(lambda: fleet.send("GET", "/load")[2]["replicas"][1]["state"] == "ready")
        lines = disturbed(fleet, path, body, lambda: fleet.engine_of(engines).kill())
        assert joined(lines) == wanted
        assert fleet.counts["continued"] >= 1
        assert not fleet.counts["diverged"]
        until(lambda: not fleet.client.admission.open)


def test_log_probabilities_of_a_prompt_come_once_from_the_engine_that_answers(
    plain, engines
):
    path, body = TEXT, {"prompt": list(range(90)), "prompt_logprobs": 1, "n": 2}
    body |= {"logprobs": 1, "seed": 11, **LONG}
    wanted = plain.send("POST", path, body)[2]
    with (
        Fleet([each.address for each in engines]) as fleet,
        ThreadPoolExecutor(1) as pool,
    ):
        until(lambda: fleet.send("GET", "/load")[2]["replicas"][1]["state"] == "ready")
        asked = pool.submit(fleet.send, "POST", path, body)
        until(lambda: any(part.handle.token_ids for part in fleet.parts))
        fleet.engine_of(engines).kill()
        status, _, found = asked.result()
        assert status == 200
        assert without_names(found) == without_names(wanted)
        assert fleet.counts["continued"] == 2


def without_names(value):
    if isinstance(value, dict):
        return {k: without_names(v) for k, v in value.items() if k not in CHANGING}
    return [*map(without_names, value)] if isinstance(value, list) else value


def test_a_stop_string_may_lie_across_the_loss_of_an_engine(plain, engines):
    body = {"prompt": [5, 6, 7], "seed": 12, **LONG}
    text = plain.send("POST", TEXT, body)[2]["choices"][0]["text"]
    body["stop"] = [text[-160:-120]]
    wanted = joined(undisturbed(plain, TEXT, body))
    with Fleet([each.address for each in engines]) as fleet:
        until(lambda: fleet.send("GET", "/load")[2]["replicas"][1]["state"] == "ready")
        lines = disturbed(fleet, TEXT, body, lambda: fleet.engine_of(engines).kill())
        assert joined(lines) == wanted
        assert fleet.counts["continued"] == 1
