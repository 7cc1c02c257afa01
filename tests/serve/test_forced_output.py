"""Calls with ``tool_choice`` auto, and recorded runs, through the whole server.

The output is forced by a choice of one text, so that no model has to decide to call.
"""

from __future__ import annotations

import json

import pytest

from http_servers import HashServer, hash_engine
from inl.config import EngineConfig
from inl.recording.replay import replay
from inl.recording.trace_file import read_trace
from inl.serve.server import engine_config
from inl.testing.hash_runner import HashRunner

CHAT = "/v1/chat/completions"
ARGUMENTS = {"city": "Rome", "days": [1, 2]}
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS})
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(scope="module")
def server():
    with HashServer(max_batch=2, max_queue=8) as server:
        yield server


def ask(server, text, **options):
    body = {
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "structured_outputs": {"choice": [text]},
        "max_tokens": 200,
        **options,
    }
    return server.send("POST", CHAT, body)


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_call_that_the_model_chose_is_parsed(server, choice):
    status, _, body = ask(server, f"I look. {MARKED}", tools=TOOLS, **choice)
    assert status == 200
    (found,) = body["choices"]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"].strip() == "I look."
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_a_call_that_the_model_chose_is_streamed(server):
    text = ask(server, MARKED * 2, tools=TOOLS, stream=True)[2].decode()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    choices = [each for event in events for each in json.loads(event)["choices"]]
    names, arguments = {}, {}
    for choice in choices:
        assert "<tool_call>" not in (choice["delta"].get("content") or "")
        for part in choice["delta"].get("tool_calls", ()):
            if "name" in part["function"]:
                names[part["index"]] = part["function"]["name"]
            before = arguments.get(part["index"], "")
            arguments[part["index"]] = before + part["function"]["arguments"]
    assert names == {0: "weather", 1: "weather"}
    assert [json.loads(each) for each in arguments.values()] == [ARGUMENTS] * 2
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (MARKED, {}),
        (MARKED, {"tools": TOOLS, "tool_choice": "none"}),
        ("No call.", {"tools": TOOLS}),
    ],
)
def test_other_output_stays_text(server, text, options):
    (found,) = ask(server, text, **options)[2]["choices"]
    assert found["message"]["content"] == text
    assert "tool_calls" not in found["message"]
    assert found["finish_reason"] == "stop"


class TracedServer(HashServer):
    """Records all steps."""

    def __init__(self, path, **settings):
        super().__init__(**settings)
        self._path = path

    def _open(self, on_step):
        config = engine_config(
            EngineConfig(trace=str(self._path)), self.config, self._max_batch
        )
        self.engine = hash_engine(self._max_batch, config=config, on_step=on_step)
        return self.engine


class Other(HashRunner):
    """Computes other tokens."""

    def _sample_token(self, task, sample, number):
        return super()._sample_token(task, sample, number) ^ 1


def test_the_trace_of_a_server_replays_with_equal_tokens(tmp_path):
    path = tmp_path / "steps.trace"
    bodies = [
        {"prompt": [7, 8, 9 + at], "max_tokens": 5 + at, "seed": at, "ignore_eos": True}
        for at in range(5)
    ]
    with TracedServer(path, max_batch=2) as server:
        for body in bodies:
            assert server.send("POST", "/v1/completions", body)[0] == 200
        steps = server.engine.stats.steps
    items = list(read_trace(path))
    outcome = replay(items, HashRunner)
    assert not outcome.differences
    assert outcome.rows >= sum(body["max_tokens"] for body in bodies)
    assert not outcome.skipped
    assert outcome.steps == steps
    assert replay(items, Other).differences, "a wrong token would be found"
