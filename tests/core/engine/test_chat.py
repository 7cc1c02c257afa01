"""``engine.chat``: conversations in, text and parsed calls out."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from byte_tokens import bytes_as_tokens
from inl.engine.answers.chat_answer import chat_answer, conversation_of
from inl.engine.answers.markup import CallMarkup, ReasoningMarkup
from inl.engine.answers.markup_parser import MarkupParser
from inl.engine.chat import tool_schemas
from inl.engine.request_handle import RequestHandle
from inl.errors import RequestError
from inl.scheduling.request import Event, Request
from inl.testing.tiny import MemoryCheckpoint
from inl.text.template import ChatTemplate

TOKENIZER = bytes_as_tokens()
SOURCE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}{{ mark or '>' }}{% endif %}"
)
ASKED = [{"role": "user", "content": "3 and 4?"}]


def add(first: int, second: int = 0) -> int:
    """Add two numbers."""
    return first + second


@dataclass
class Reply:
    yes: bool


@pytest.fixture
def chatting(engines, monkeypatch):
    """An engine whose model has a chat template that shows no tools."""
    template = ChatTemplate(SOURCE)
    monkeypatch.setattr(MemoryCheckpoint, "chat_template", template)
    yield engines(context=512)
    template.close()


def test_an_answer_is_what_generate_gives(chatting):
    expected = chatting.generate(chatting.chat_ids(ASKED), max_tokens=20)
    answer = chatting.chat(ASKED, max_tokens=20)
    assert answer.text == str(answer) == expected.text
    assert answer.completion.token_ids == expected.token_ids
    assert (answer.finish_reason, answer.tool_calls) == ("length", ())
    assert chatting.generate(ASKED, max_tokens=20).text == expected.text
    assert "".join(chatting.stream(ASKED, max_tokens=20)) == expected.text


def test_a_conversation_of_several(chatting):
    both = chatting.generate([ASKED, ASKED], max_tokens=4)
    assert [each.text for each in both] == [both[0].text] * 2


def test_tools_are_shown_where_the_template_does_not(chatting):
    plain = chatting.chat(ASKED, max_tokens=1).completion.prompt_tokens
    shown = chatting.chat(ASKED, tools=[add], max_tokens=1).completion.prompt_tokens
    hidden = chatting.chat(ASKED, tools=[add], tool_choice="none", max_tokens=1)
    assert hidden.completion.prompt_tokens == plain
    assert shown > plain + len(json.dumps(tool_schemas([add])[0]["function"]))


@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_forced_call_is_parsed(chatting, choice):
    pytest.importorskip("llguidance")
    bounded = {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"first": {"enum": [3]}, "second": {"enum": [4]}},
            "required": ["first", "second"],
            "additionalProperties": False,
        },
    }
    answer = chatting.chat(ASKED, tools=[bounded], tool_choice=choice, max_tokens=200)
    (call,) = answer.tool_calls
    assert (call.name, call.arguments) == ("add", {"first": 3, "second": 4})
    assert (answer.finish_reason, answer.text) == ("tool_calls", "")
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    chatting.chat([*ASKED, answer.message, result], max_tokens=1)


def test_a_class_is_the_structure_of_an_answer(chatting):
    pytest.importorskip("llguidance")
    answer = chatting.chat(ASKED, structured=Reply, max_tokens=100, temperature=0)
    assert answer.finish_reason in ("stop", "length")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text)["yes"], bool)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    text = chatting.generate("x", structured=closed, max_tokens=100).text
    assert text.strip().startswith("{")


def finished(text, reason="stop"):
    handle = RequestHandle(Request([0]), TOKENIZER, (), 0.0)
    *ids, last = TOKENIZER.encode(text)
    for token in ids:
        handle.apply_event(Event(1, token), 0.0)
    handle.apply_event(Event(1, last, "length"), 0.0)
    handle.finish_reason = reason
    return handle


def parser(**options):
    return MarkupParser(CallMarkup(), ReasoningMarkup(), tools=["add"], **options)


CALL = '<tool_call>\n{"name": "add", "arguments": {"first": 1}}\n</tool_call>'


def test_reasoning_text_and_calls_are_told_apart():
    answer = chat_answer(finished(f"<think>\nhm</think>\nI add.{CALL}{CALL}"), parser())
    assert (answer.reasoning.strip(), answer.text) == ("hm", "I add.")
    assert [call.arguments for call in answer.tool_calls] == [{"first": 1}] * 2
    assert len({call.id for call in answer.tool_calls}) == 2
    assert answer.finish_reason == "tool_calls"
    function = answer.message["tool_calls"][0]["function"]
    assert function == {"name": "add", "arguments": {"first": 1}}
    assert answer.message["reasoning_content"] == answer.reasoning


def test_a_call_that_is_cut_off_has_no_arguments():
    cut = CALL[: CALL.index("1}}")]
    answer = chat_answer(finished(cut, "length"), parser())
    (call,) = answer.tool_calls
    assert (call.arguments, call.text.strip()) == (None, '{"first":')
    assert answer.finish_reason == "length"
    assert answer.message["tool_calls"][0]["function"]["arguments"] == call.text


@pytest.mark.parametrize(
    ("tools", "choice"), [([], "required"), ([add], "sub"), ([add], 3), ([], "add")]
)
def test_a_choice_that_is_none_is_refused(tools, choice):
    with pytest.raises(RequestError, match="tool_choice"):
        conversation_of("a", tool_schemas(tools), choice, {})


def test_what_chat_refuses(chatting, engines):
    with pytest.raises(RequestError, match="tools"):
        chatting.chat(ASKED, tools=[{"type": "function"}])
    with pytest.raises(RequestError, match="n: found 2"):
        chatting.chat(ASKED, n=2)


def test_a_model_without_a_template_is_refused(engines):
    with pytest.raises(RequestError, match="has no chat template"):
        engines().chat("a")
