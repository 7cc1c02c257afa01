"""The answer to a conversation: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from inl.bounded_json import parse_json
from inl.engine.answers.conversation import Answer, Conversation, Tool
from inl.errors import InvalidJson, RequestError

if TYPE_CHECKING:
    from inl.engine.answers.output_parser import OutputParser
    from inl.engine.request_handle import Completion, RequestHandle
    from inl.scheduling.request import FinishReason

CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    """By the names of the function's parameters; ``None`` if ``text`` is no JSON
    object, as where the token limit has cut it off."""
    text: str
    """The arguments as the model wrote them."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What ``InferenceEngine.chat`` returns. ``str()`` of it is its text."""

    text: str
    """Without reasoning and calls."""
    reasoning: str
    """What the model wrote before its answer; empty if it does not reason."""
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason | Literal["tool_calls"]
    """As in the completion; "tool_calls" if the model has ended with calls."""
    completion: Completion
    """The whole output, with its tokens and times."""

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.text
                        if call.arguments is None
                        else dict(call.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message


def conversation_of(
    messages: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str,
    variables: Mapping[str, Any],
) -> Conversation:
    """Return a conversation.

    tools: schemas, as chat templates expect them. tool_choice: "auto", "none",
    "required", or the name of a tool. Raises :class:`~inl.errors.RequestError`.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    offered = [_tool(at, schema) for at, schema in enumerate(tools)]
    names = [tool.name for tool in offered]
    if tool_choice not in (*CHOICES, *names) or (
        tool_choice == "required" and not names
    ):
        raise RequestError(
            f"tool_choice: found {tool_choice!r:.60}, accepts auto, none, required "
            f"with tools, or the name of one: {', '.join(names) or 'there is none'}"
        )
    choice = tool_choice if tool_choice in CHOICES else f"tool:{tool_choice}"
    variables = dict(variables)
    continued = variables.pop("continue_final_message", False)
    if not isinstance(continued, bool):
        raise RequestError(
            f"continue_final_message: found {continued!r:.60}, accepts True or False"
        )
    return Conversation(
        messages, offered, choice, only_tools=True, variables=variables,
        continue_final=continued,
    )  # fmt: skip


def _tool(at: int, schema: Mapping[str, Any]) -> Tool:
    function = schema.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RequestError(
            f"tools[{at}]: found {schema!r:.60}, accepts a function, or a dict with "
            "its name, description and parameters"
        )
    return Tool(
        name, function.get("description") or "", function.get("parameters") or {}
    )


def chat_answer(handle: RequestHandle, parser: OutputParser) -> ChatAnswer:
    """Return the answer of a request that has finished.

    parser: of its text, which has read nothing yet. Raises the request's error.
    """
    completion = handle.completion()
    answer = Answer()
    if parser.sees_special:
        answer.add(parser.feed(*handle.take_whole()))
    else:
        answer.add(parser.feed(handle.take()))
    answer.add(parser.finish())
    ended = completion.finish_reason == "stop" and parser.has_calls
    return ChatAnswer(
        text=answer.content,
        reasoning=answer.reasoning,
        tool_calls=tuple(
            ToolCall(call.id, call.name, _arguments(call.arguments), call.arguments)
            for call in answer.calls
        ),
        finish_reason="tool_calls" if ended else completion.finish_reason,
        completion=completion,
    )


def _arguments(text: str) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text, "arguments")
    except InvalidJson:
        return None
    return found if isinstance(found, dict) else None
