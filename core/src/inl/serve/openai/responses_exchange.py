"""``/v1/responses``: its responses and events."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from inl.serve.api_error import ApiError
from inl.serve.dialect import ReadUsage, parse
from inl.serve.event_stream import EVENTS, event
from inl.serve.job import Answer, Delta, Usage
from inl.serve.openai.responses import Item, ResponsesRequest, input_items, job_of
from inl.serve.openai.usage import chat_logprobs
from inl.serve.resuming import Origin, ResumableExchange
from inl.serve.token_texts import NoTokenTexts, TokenPlaces, TokenTexts

if TYPE_CHECKING:
    import msgspec


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return the ``usage`` object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _Stored(msgspec.Struct):
    """What later responses need of a stored one."""

    items: list[Item]


class _StoredResponse(msgspec.Struct):
    response: msgspec.Raw


def response_of(stored: bytes) -> bytes:
    """Return the finished response of :meth:`ResponsesExchange.stored`."""
    return bytes(msgspec.json.decode(stored, type=_StoredResponse).response)


class ResponsesExchange(ResumableExchange):
    """One response: reasoning, a message and calls, each an item of its output."""

    stream_format = EVENTS

    def __init__(self, body: bytes, number: str, model: str) -> None:
        request = parse(body, ResponsesRequest)
        self.job = job_of(request, number)
        self.is_stored = request.store is not False
        # Not to be guessed from those of others.
        self.id = f"resp_{number}_{secrets.token_hex(8)}"
        self._request = request
        self.sampling: tuple[float | None, float | None]
        self.sampling = request.temperature, request.top_p
        """Temperature and ``top_p``; with the model's defaults once it is known."""
        self._earlier: list[Item] = []
        self._final: dict[str, Any] = {}
        """The finished response."""
        self._number = number
        self._model = request.model or model
        self.token_text: TokenTexts = NoTokenTexts()
        self._places: TokenPlaces | None = None
        self._created = int(time.time())
        self._sequence = itertools.count()
        self._items: list[_Item] = []

    def restore(self, origin: Origin) -> None:
        """Use the id and the time of the request that has begun the answer."""
        self.id = f"resp_{origin.number}_{origin.nonce}"
        self._created = origin.created

    def count_from(self, events: int) -> None:
        """Number the next event as the one behind so many."""
        self._sequence = itertools.count(events)

    @property
    def previous_id(self) -> str | None:
        """Id of the response that this one continues."""
        return self._request.previous_response_id

    def continue_from(self, stored: bytes) -> None:
        """Put the items of a response before the input; stored: of :meth:`stored`."""
        self._earlier = msgspec.json.decode(stored, type=_Stored).items
        self.job = job_of(self._request, self._number, self._earlier)

    def stored(self) -> bytes:
        """Return the finished response, and all items that it has read and written."""
        items = [*self._earlier, *input_items(self._request), *self._final["output"]]
        return msgspec.json.encode({"response": self._final, "items": items})

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response."""
        (answer,) = answers
        length = answer.finish_reason == "length"
        status = "incomplete" if length else "completed"
        items = [item.body(status) for item in self._items_of(answer)]
        self._final = self._response(status, items, usage)
        return self._final

    def _items_of(self, answer: Answer) -> list[_Item]:
        delta = Delta(
            content=answer.content,
            reasoning=answer.reasoning,
            logprobs=answer.logprobs,
        )
        self._items = []
        self._add(delta)
        for call in answer.calls:
            item = self._start("function_call", call.id, call.name)
            item.text = call.arguments
        if not self._items:
            self._start("message")
        return self._items

    def _add(self, delta: Delta) -> None:
        if delta.reasoning:
            self._start("reasoning").text += delta.reasoning
        if delta.content:
            item = self._start("message")
            item.text += delta.content
            item.logprobs += self._logprobs(delta)

    def _logprobs(self, delta: Delta) -> list[msgspec.Raw]:
        if self._places is None:
            self._places = TokenPlaces(self.token_text)
        return chat_logprobs(delta.logprobs, self._places)

    def _start(self, kind: str, call: str = "", name: str = "") -> _Item:
        item = _Item(kind, f"{self._number}{len(self._items)}", call, name)
        self._items.append(item)
        return item

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        request = self._request
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        finished = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if finished else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {
                "effort": request.reasoning and request.reasoning.effort,
                "summary": request.reasoning and request.reasoning.summary,
            },
            "safety_identifier": request.safety_identifier,
            "service_tier": request.service_tier or "default",
            "store": self.is_stored,
            "temperature": self.sampling[0],
            "text": {"format": _format(request)},
            "tool_choice": _choice(request),
            "tools": [_tool(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self.sampling[1],
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "truncation": request.truncation or "disabled",
            "usage": usage and usage_body(usage),
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = {"type": name, "sequence_number": next(self._sequence), **fields}
        return event(body, name)

    def opening(self, usage: Usage) -> bytes:
        """Return the start of the response."""
        del usage
        response = {"response": self._response("in_progress", [], None)}
        created = self._event("response.created", response)
        return created + self._event("response.in_progress", response)

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the events of a delta."""
        del index, usage
        parts = []
        if delta.reasoning:
            parts.append(self._part("reasoning", delta.reasoning))
        if delta.content:
            logprobs = self._logprobs(delta)
            parts.append(self._part("message", delta.content, logprobs))
        for call in delta.calls:
            if call.name is not None:
                parts.append(self._open("function_call", call.id or "", call.name))
            if call.arguments:
                parts.append(self._text_delta(call.arguments, []))
        return b"".join(parts)

    def _part(
        self, kind: str, text: str, logprobs: list[msgspec.Raw] | None = None
    ) -> bytes:
        opened = b""
        if not self._items or self._items[-1].kind != kind:
            opened = self._open(kind)
        return opened + self._text_delta(text, logprobs or [])

    def _open(self, kind: str, call: str = "", name: str = "") -> bytes:
        closed = self._close("completed")
        item = self._start(kind, call, name)
        fields = {"output_index": len(self._items) - 1}
        body = item.body("in_progress")
        added = self._event("response.output_item.added", {**fields, "item": body})
        if kind == "message":
            added += self._event(
                "response.content_part.added", {**self._place(), "part": _part("", [])}
            )
        return closed + added

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else {**place, "content_index": 0}

    def _text_delta(self, text: str, logprobs: list[msgspec.Raw]) -> bytes:
        item = self._items[-1]
        item.text += text
        fields = {**self._place(), "delta": text}
        if item.kind == "message":
            item.logprobs += logprobs
            fields["logprobs"] = logprobs
        return self._event(f"{EVENT_NAMES[item.kind]}.delta", fields)

    def _close(self, status: str) -> bytes:
        """Return the end of the open item, if there is one."""
        if not self._items:
            return b""
        item, place = self._items[-1], self._place()
        field = "arguments" if item.kind == "function_call" else "text"
        fields: dict[str, Any] = {**place, field: item.text}
        if item.kind == "message":
            fields["logprobs"] = item.logprobs
        if item.kind == "function_call":
            fields["name"] = item.name
        parts = [self._event(f"{EVENT_NAMES[item.kind]}.done", fields)]
        if item.kind == "message":
            part = {**place, "part": _part(item.text, item.logprobs)}
            parts.append(self._event("response.content_part.done", part))
        done = {"output_index": len(self._items) - 1, "item": item.body(status)}
        parts.append(self._event("response.output_item.done", done))
        return b"".join(parts)

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the end of the last item and of the response."""
        (answer,) = answers
        length = answer.finish_reason == "length"
        status = "incomplete" if length else "completed"
        opened = b"" if self._items else self._open("message")
        closed = self._close(status)
        items = [item.body("completed") for item in self._items[:-1]]
        items.append(self._items[-1].body(status))
        self._final = self._response(status, items, usage)
        last = self._event(f"response.{status}", {"response": self._final})
        return opened + closed + last

    def failure(self, error: ApiError) -> bytes:
        """Return an error in mid-stream."""
        response = self._response("failed", [], None)
        response["error"] = {"code": error.code or "server_error",
                             "message": error.message}  # fmt: skip
        fields = {"code": error.code, "message": error.message, "param": error.param}
        failed = self._event("response.failed", {"response": response})
        return self._event("error", fields) + failed


EVENT_NAMES = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class _Item:
    """An item of the output."""

    def __init__(self, kind: str, number: str, call: str, name: str) -> None:
        self.kind = kind
        self.id = f"{PREFIXES[kind]}_{number}"
        self.call = call
        self.name = name
        self.text = ""
        self.logprobs: list[msgspec.Raw] = []

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as the API describes it."""
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {
                **head,
                "call_id": self.call,
                "name": self.name,
                "arguments": self.text,
            }
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}]
            return {**head, "summary": [], "content": content}
        content = [_part(self.text, self.logprobs)] if status != "in_progress" else []
        return {**head, "role": "assistant", "content": content}


def _part(text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprobs,
    }


def _format(request: ResponsesRequest) -> dict[str, Any]:
    given = request.text and request.text.format
    return given or {"type": "text"}


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type == "allowed_tools":
        return choice
    return {"type": choice.type, "name": choice.name}


def _tool(tool: Any) -> dict[str, Any]:
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
