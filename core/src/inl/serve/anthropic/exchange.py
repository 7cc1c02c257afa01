"""``/v1/messages``: its responses and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inl.serve.anthropic.messages import MessagesRequest, job_of
from inl.serve.api_error import ApiError
from inl.serve.dialect import ReadUsage, parse
from inl.serve.event_stream import EVENTS, event
from inl.serve.job import Answer, Delta, Usage
from inl.serve.resuming import Origin, ResumableExchange
from inl.serve.token_texts import NoTokenTexts, TokenTexts

STOP_REASONS = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return the ``usage`` object; cached tokens are not input tokens there."""
    return {
        "cache_creation": None,
        "inference_geo": None,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": None,
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


class MessagesExchange(ResumableExchange):
    """One answer to a conversation."""

    stream_format = EVENTS

    def __init__(self, body: bytes, number: str, model: str) -> None:
        request = parse(body, MessagesRequest)
        self.job = job_of(request, number)
        self._head = {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": request.model or model,
            "container": None,
        }
        self._blocks = _Blocks()
        self.token_text: TokenTexts = NoTokenTexts()

    def restore(self, origin: Origin) -> None:
        """Do nothing: its only name is the number of the request."""

    def count_from(self, events: int) -> None:
        """Do nothing: events have no numbers."""

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response."""
        (answer,) = answers
        return {**self._head, "content": _content(answer), **_end(answer, usage)}

    def opening(self, usage: Usage) -> bytes:
        """Return the start of the message."""
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": usage_body(usage),
        }
        body = {"type": "message_start", "message": message}
        return event(body, "message_start") + event({"type": "ping"}, "ping")

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the events of a delta."""
        del index, usage
        return self._blocks.events(delta)

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the end of the last block and of the message."""
        (answer,) = answers
        end = _end(answer, usage)
        body = {"type": "message_delta", "usage": end.pop("usage"), "delta": end}
        stop = event({"type": "message_stop"}, "message_stop")
        return self._blocks.close() + event(body, "message_delta") + stop

    def failure(self, error: ApiError) -> bytes:
        """Return an error in mid-stream."""
        return event(error.anthropic(), "error")


def _end(answer: Answer, usage: Usage) -> dict[str, Any]:
    return {
        "stop_reason": STOP_REASONS[answer.finish_reason],
        "stop_sequence": answer.stop_string,
        "stop_details": None,
        "usage": usage_body(usage),
    }


def _content(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = {"type": "thinking", "thinking": answer.reasoning, "signature": ""}
        blocks.append(thought)
    if answer.content or not (answer.calls or answer.reasoning):
        blocks.append({**_EMPTY, "text": answer.content})
    for call in answer.calls:
        blocks.append(_tool_use(call.id, call.name, call.values))
    return blocks


def _tool_use(call: str, name: str, arguments: Any) -> dict[str, Any]:
    block = {"type": "tool_use", "id": call, "name": name, "input": arguments}
    return {**block, "caller": {"type": "direct"}}


class _Blocks:
    """The content blocks of a stream, of which one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def events(self, delta: Delta) -> bytes:
        """Return the events of a delta."""
        parts = []
        if delta.reasoning:
            start = {"type": "thinking", "thinking": "", "signature": ""}
            parts.append(self._open("thinking", start))
            parts.append(self._delta("thinking_delta", "thinking", delta.reasoning))
        if delta.content:
            parts.append(self._open("text", _EMPTY))
            parts.append(self._delta("text_delta", "text", delta.content))
        for part in delta.calls:
            if part.name is not None:
                start = _tool_use(part.id or "", part.name, {})
                parts.append(self._open(f"call {part.index}", start))
            if part.arguments:
                fields = ("input_json_delta", "partial_json", part.arguments)
                parts.append(self._delta(*fields))
        return b"".join(parts)

    def close(self) -> bytes:
        """End the open block; an answer has at least one."""
        opened = b"" if self._index >= 0 else self._open("text", _EMPTY)
        return opened + self._stop()

    def _open(self, kind: str, start: dict[str, Any]) -> bytes:
        if kind == self._kind:
            return b""
        stopped = self._stop() if self._kind else b""
        self._kind = kind
        self._index += 1
        name = "content_block_start"
        body = {"type": name, "index": self._index, "content_block": start}
        return stopped + event(body, name)

    def _stop(self) -> bytes:
        name = "content_block_stop"
        return event({"type": name, "index": self._index}, name)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        name, value = "content_block_delta", {"type": kind, field: text}
        return event({"type": name, "index": self._index, "delta": value}, name)


_EMPTY = {"type": "text", "text": "", "citations": []}
"""The API's description requires citations, and the AI SDK's provider refuses null."""
