"""Structured outputs of strangers: nothing that one client can do to another."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from http_servers import HashServer

pytest.importorskip("llguidance")
from inl.guidance.trials import GrammarTrials

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SIZE = {"enum": ["small", "large"]}
PARAMETERS = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/Size"}},
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"Size": SIZE},
}
OTHER = {**PARAMETERS, "$defs": {"Size": {"const": 7}}}


def function(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [function("scale", PARAMETERS), function("count", OTHER)]


@pytest.fixture(scope="module")
def server():
    # More requests at once than asyncio has threads.
    with HashServer(max_batch=2, max_queue=64) as server:
        yield server


def complete(server, structured=None, /, **options):
    body = {"prompt": "Some text.", "max_tokens": 8, **options}
    if structured is not None:
        body["structured_outputs"] = structured
    status, _, answer = server.send("POST", COMPLETIONS, body)
    return status, answer


@pytest.mark.parametrize("choice", ["required", "scale", "count"])
def test_parameters_of_a_forced_call_may_refer_to_their_definitions(server, choice):
    named = {"type": "function", "function": {"name": choice}}
    body = {
        "messages": [{"role": "user", "content": "Scale it."}],
        "tools": TOOLS,
        "tool_choice": choice if choice == "required" else named,
        "max_tokens": 100,
    }
    status, _, answer = server.send("POST", CHAT, body)
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    name = call["function"]["name"]
    assert choice in ("required", name)
    size = json.loads(call["function"]["arguments"])["size"]
    assert size in (["small", "large"] if name == "scale" else [7])


def test_a_grammar_that_ends_its_process_is_refused(server):
    rules = [f"r{at}: r{at + 1}" for at in range(5_000)]
    lark = "\n".join(["start: r0", *rules, 'r5000: "a"'])
    status, answer = complete(server, {"grammar": lark})
    assert status == 400
    assert "its compilation failed" in answer["error"]["message"]
    status, answer = complete(server, {"choice": ["yes\x7f"]})
    assert (status, answer["choices"][0]["text"]) == (200, "yes\x7f")


def test_waiting_grammars_do_not_delay_other_requests(server, monkeypatch):
    """Nor those with a grammar that is compiled already."""
    common = {"regex": "a{3}"}
    assert complete(server, common)[0] == 200
    waiting, may_go = threading.Semaphore(0), threading.Event()
    run = GrammarTrials.run

    def held(*arguments):
        waiting.release()
        assert may_go.wait(300)
        return run(*arguments)

    monkeypatch.setattr(GrammarTrials, "run", held)
    # As many as there are threads of asyncio, which tokenizing uses.
    count = min(28, (os.cpu_count() or 1) + 4)
    with ThreadPoolExecutor(count) as clients:
        answers = [
            clients.submit(complete, server, {"regex": f"b{at}"}) for at in range(count)
        ]
        try:
            for _ in range(count):
                assert waiting.acquire(timeout=300)
            assert complete(server)[0] == 200
            assert complete(server, common)[0] == 200
            assert server.send("GET", "/health")[0] == 200
        finally:
            may_go.set()
        assert {answer.result()[0] for answer in answers} == {200}
    server.wait_idle()


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_large_structural_tags_are_refused_by_their_field(server, field):
    tag = {
        "structures": [
            {"begin": f"<t{at}>", "schema": {}, "end": "</t>"} for at in range(3_000)
        ],
        "triggers": [*(f"<u{at}>" for at in range(3_000)), "<t"],
    }
    value = {"type": "structural_tag", **tag}
    if field == "structured_outputs":
        value = {"structural_tag": tag}
    status, answer = complete(server, **{field: value})
    assert status == 400
    assert answer["error"]["param"].startswith(field)
    assert "found 3000 structures, accepts 1 to 500" in answer["error"]["message"]


OPEN = {"type": "object", "properties": {"size": SIZE}, "required": ["size"]}
FORMAT = {"name": "P", "schema": OPEN}
MESSAGES = [{"role": "user", "content": "Scale it."}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": FORMAT}}),
        (CHAT, {"structured_outputs": {"json": OPEN}}),
        (CHAT, {"structured_outputs": {"json": json.dumps(OPEN)}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", **FORMAT}}}),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": OPEN}}},
        ),
        ("/api/chat", {"format": OPEN}),
    ],
)
def test_objects_of_a_schema_have_its_properties_only(server, path, fields):
    """Random tokens would go on with names of their own, up to the last token."""
    body = {"messages": MESSAGES, "max_tokens": 100, **fields}
    if path == "/v1/responses":
        body = {"input": "Scale it.", "max_output_tokens": 100, **fields}
    if path == "/api/chat":
        del body["max_tokens"]
        body |= {"stream": False, "options": {"num_predict": 100}}
    status, _, answer = server.send("POST", path, body)
    assert status == 200, answer
    if path == CHAT:
        text = answer["choices"][0]["message"]["content"]
    elif path == "/v1/responses":
        text = answer["output"][0]["content"][0]["text"]
    elif path == "/api/chat":
        text = answer["message"]["content"]
    else:
        text = answer["content"][0]["text"]
    assert list(json.loads(text)) == ["size"]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_arguments_of_a_forced_call_have_named_properties_only(server, path):
    """Also without ``strict``: a function that gets others fails."""
    body = {"messages": MESSAGES, "max_tokens": 100, "tool_choice": "required"}
    body["tools"] = [function("scale", OPEN)]
    if path == "/v1/responses":
        del body["messages"], body["max_tokens"]
        body |= {"input": "Scale it.", "max_output_tokens": 100}
        body["tools"] = [{"type": "function", "name": "scale", "parameters": OPEN}]
    if path == "/v1/messages":
        body["tool_choice"] = {"type": "any"}
        body["tools"] = [{"name": "scale", "input_schema": OPEN}]
    status, _, answer = server.send("POST", path, body)
    assert status == 200, answer
    if path == CHAT:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
    elif path == "/v1/responses":
        arguments = json.loads(answer["output"][-1]["arguments"])
    else:
        arguments = answer["content"][-1]["input"]
    assert list(arguments) == ["size"]
