"""``/api/chat`` and ``/api/generate``: their responses, a line of JSON each part."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from inl.serve.api_error import ApiError
from inl.serve.dialect import ReadUsage, parse
from inl.serve.event_stream import StreamFormat, encode
from inl.serve.job import Answer, Call, Delta, Job, Usage
from inl.serve.ollama.fields import DEFAULTS, GenerationFields
from inl.serve.ollama.messages import (
    GenerateRequest,
    OllamaChatRequest,
    chat_job,
    generate_job,
    is_load,
)
from inl.serve.openai.usage import chat_logprobs
from inl.serve.token_texts import NoTokenTexts, TokenPlaces, TokenTexts

MEDIA_TYPE = b"application/x-ndjson"

DONE_REASONS = {
    "stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "stop"
}  # fmt: skip


def line(body: Any) -> bytes:
    """Return one line of a stream."""
    return encode(body) + b"\n"


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Return a duration as Ollama writes it."""
    return max(int(seconds * 1e9), 0)


class OllamaExchange(ABC):
    """One answer; a load job has an empty one."""

    def __init__(self, request: GenerationFields, job: Job, model: str) -> None:
        self.job = job
        self._received = time.perf_counter()
        self._model = request.model or model
        self._is_load = is_load(job)
        self._has_logprobs = bool(request.logprobs)
        self.token_text: TokenTexts = NoTokenTexts()
        self._places: TokenPlaces | None = None
        # Its clients read each line as a part: there are no comments.
        self.stream_format = StreamFormat(MEDIA_TYPE, line(self._part("")))

    @abstractmethod
    def _text(
        self, content: str, thinking: str, calls: Sequence[Call]
    ) -> dict[str, Any]:
        """Return the fields of a part of the answer."""

    def _ending(self, answer: Answer) -> dict[str, Any]:
        """Return further fields of the last part."""
        del answer
        return {}

    def _part(
        self,
        content: str,
        thinking: str = "",
        calls: Sequence[Call] = (),
        part: Answer | Delta | None = None,
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self._model, "created_at": now()}
        fields |= self._text(content, thinking, calls) | {"done": False}
        if part is not None and self._has_logprobs:
            if self._places is None:
                self._places = TokenPlaces(self.token_text, skip_special=True)
            fields["logprobs"] = chat_logprobs(part.logprobs, self._places)
        return fields

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response."""
        (answer,) = answers
        if self._is_load:
            return self._last(answer, usage, self._part(""))
        whole = self._part(answer.content, answer.reasoning, answer.calls, answer)
        return self._last(answer, usage, whole)

    def opening(self, usage: Usage) -> bytes:
        """Return nothing: the first line is that of the first text."""
        del usage
        return b""

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the line of a delta; calls follow once they are complete."""
        del index, usage
        has_scores = self._has_logprobs and bool(delta.logprobs)
        if self._is_load or not (delta.content or delta.reasoning or has_scores):
            return b""
        return line(self._part(delta.content, delta.reasoning, (), delta))

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the calls, and the last line."""
        (answer,) = answers
        has_calls = answer.calls and not self._is_load
        calls = line(self._part("", "", answer.calls)) if has_calls else b""
        return calls + line(self._last(answer, usage, self._part("")))

    def _last(
        self, answer: Answer, usage: Usage, part: dict[str, Any]
    ) -> dict[str, Any]:
        part["done"] = True
        if self._is_load:
            return {**part, "done_reason": "load"}
        began = answer.began or answer.ended
        return {
            **part,
            "done_reason": DONE_REASONS[answer.finish_reason],
            **self._ending(answer),
            "total_duration": nanoseconds(time.perf_counter() - self._received),
            "load_duration": nanoseconds(answer.submitted - self._received),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(began - answer.submitted),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(answer.ended - began),
        }

    def failure(self, error: ApiError) -> bytes:
        """Return an error in mid-stream."""
        return line(error.ollama())


class OllamaChatExchange(OllamaExchange):
    """An answer of ``/api/chat``."""

    def __init__(self, body: bytes, number: str, model: str) -> None:
        request = parse(body, OllamaChatRequest, DEFAULTS)
        super().__init__(request, chat_job(request, number), model)

    def _text(
        self, content: str, thinking: str, calls: Sequence[Call]
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {
                        "index": at, "name": call.name, "arguments": call.values
                    },
                }
                for at, call in enumerate(calls)
            ]  # fmt: skip
        return {"message": message}


class OllamaGenerateExchange(OllamaExchange):
    """An answer of ``/api/generate``."""

    def __init__(self, body: bytes, number: str, model: str) -> None:
        request = parse(body, GenerateRequest)
        self._is_raw = bool(request.raw)
        super().__init__(request, generate_job(request, number), model)

    def _text(
        self, content: str, thinking: str, calls: Sequence[Call]
    ) -> dict[str, Any]:
        del calls  # there are no tools
        return {"response": content, **({"thinking": thinking} if thinking else {})}

    def _ending(self, answer: Answer) -> dict[str, Any]:
        if self._is_raw:
            return {}
        return {"context": [*answer.prompt_ids, *answer.token_ids]}
