"""How a model writes reasoning and tool calls, found by rendering its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inl.bounded_json import parse_prefix
from inl.errors import InlError, InvalidJson

Render = Callable[..., str]
"""Renders messages and variables to text."""

NAME, KEY, VALUE, TEXT = "inlname", "inlkey", "inlvalue", "inltext"
"""Words that no template contains."""

USER = {"role": "user", "content": "a"}


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """A tool call is JSON between two marks, either of which may be empty."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True)
class ReasoningMarkup:
    """Reasoning is text between two marks."""

    begin: str = "<think>"
    end: str = "</think>"


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup of a model's output."""

    calls: CallMarkup | None = None
    """``None``: calls are not JSON, and remain text."""
    reasoning: ReasoningMarkup | None = None
    has_tools: bool = False
    """Whether the chat template shows tools to the model."""


def derive(render: Render, source: str) -> Markup:
    """Return the markup of a template.

    source: the template, which says whether a model reasons where it does not render
    the reasoning of earlier answers.
    """
    reasoning = _reasoning(render)
    if reasoning is None and ReasoningMarkup().end in source:
        reasoning = ReasoningMarkup()
    tool = {"name": NAME, "description": TEXT, "parameters": {"type": "object"}}
    shown = _try(render, [USER], tools=[{"type": "function", "function": tool}])
    if shown is None or NAME not in shown:
        return Markup(CallMarkup(), reasoning)
    return Markup(_calls(render), reasoning, has_tools=True)


def _calls(render: Render) -> CallMarkup | None:
    function = {"name": NAME, "arguments": {KEY: VALUE}}
    call = {"id": "call00000", "type": "function", "function": function}
    called = _try(render, [USER, _assistant("", tool_calls=[call])])
    plain = _try(render, [USER, _assistant(TEXT)])
    if called is None or plain is None or TEXT not in plain or NAME not in called:
        return None
    head, _, tail = plain.rpartition(TEXT)
    # The texts may differ before the content, such as in a header of calls.
    start = _common(head, called)
    found = _object_around(called, called.rindex(NAME))
    if found is None:
        return None
    begin, end, value = found
    names = [key for key, item in value.items() if item == NAME]
    arguments = [key for key, item in value.items() if item == {KEY: VALUE}]
    if not names or not arguments:
        return None
    after = called[end:].removesuffix(tail)
    closing = after.strip() if after != called[end:] else ""
    mark = called[start:begin].strip().removesuffix("[").strip()
    return CallMarkup(mark, closing.lstrip("]"), names[0], arguments[0])


def _reasoning(render: Render) -> ReasoningMarkup | None:
    thought = _try(render, [USER, _assistant(TEXT, reasoning_content=VALUE)])
    if thought is None or VALUE not in thought or TEXT not in thought:
        return None
    before, _, after = thought.partition(VALUE)
    between = after.partition(TEXT)[0].strip()
    plain = _try(render, [USER, _assistant(TEXT)]) or ""
    begin = before[_common(plain, before) :].strip() or ReasoningMarkup().begin
    if ReasoningMarkup().begin in before[-16:]:
        begin = ReasoningMarkup().begin
    return ReasoningMarkup(begin, between) if between else None


def _assistant(content: str, **fields: Any) -> Mapping[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def _try(render: Render, messages: list[Any], **variables: Any) -> str | None:
    try:
        return render(messages, add_generation_prompt=False, **variables)
    except InlError:
        return None  # a template may refuse such messages


def _common(left: str, right: str) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    shorter = min(len(left), len(right))
    return next((at for at, (a, b) in pairs if a != b), shorter)


def _object_around(text: str, place: int) -> tuple[int, int, dict[str, Any]] | None:
    """Return start, stop and value of the JSON object with the name at ``place``."""
    start = text.rfind("{", 0, place)
    while start >= 0:
        try:
            value, stop = parse_prefix(text, start, "template")
        except InvalidJson:
            value, stop = None, 0
        if stop > place and isinstance(value, dict):
            return start, stop, value
        start = text.rfind("{", 0, start)
    return None
