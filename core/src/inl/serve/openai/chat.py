"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from inl.serve.api_error import unsupported
from inl.serve.dialect import ReadUsage, parse
from inl.serve.job import Answer, CallDelta, Conversation, Delta, Job, Usage
from inl.serve.openai.chunks import ChunkedExchange
from inl.serve.openai.fields import (
    DEFAULTS,
    FINISH_REASONS,
    GenerationFields,
    TopLogprobs,
    check_stream_options,
    options_of,
    structure_of_fields,
)
from inl.serve.openai.messages import (
    Message,
    ToolChoice,
    ToolSchema,
    template_messages,
    tool_use,
    tools_of,
)
from inl.serve.openai.usage import chat_logprobs, prompt_logprobs, usage_body
from inl.serve.sampling import Count
from inl.serve.token_texts import NoTokenTexts, TokenPlaces, TokenTexts


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a chat completion."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: TopLogprobs | None = None
    tools: list[ToolSchema] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False


CHAT_DEFAULTS = {**DEFAULTS, "add_special_tokens": (True, False)}
"""The template writes special tokens in any case."""

RESERVED = {
    "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token",
    "continue_final_message", "trust_control_tokens", "context",
}  # fmt: skip
"""Template variables and options that ``chat_template_kwargs`` must not replace."""


def conversation_of(request: ChatRequest) -> Conversation:
    """Return the conversation of a request; raises :class:`ApiError`."""
    variables = dict(request.chat_template_kwargs or {})
    if reserved := sorted(RESERVED & set(variables)):
        raise unsupported("chat_template_kwargs", f"{reserved[0]} is not accepted")
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
    if request.add_generation_prompt is False:
        variables["add_generation_prompt"] = False
    messages = template_messages(request.messages)
    if request.continue_final_message and messages[-1]["role"] != "assistant":
        raise unsupported(
            "continue_final_message", "needs a last message of the assistant"
        )
    return Conversation(
        messages,
        *tool_use(request.tool_choice, tools_of(request.tools)),
        variables=variables,
        continue_final=bool(request.continue_final_message),
        parallel_calls=request.parallel_tool_calls is not False,
    )


class ChatExchange(ChunkedExchange):
    """A chat completion."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, body: bytes, number: str, model: str) -> None:
        request = parse(body, ChatRequest, CHAT_DEFAULTS)
        self.stream_options = check_stream_options(request)
        options = options_of(request)
        if request.max_completion_tokens is not None:
            options["max_tokens"] = request.max_completion_tokens
        if request.top_logprobs is not None and not request.logprobs:
            raise unsupported("top_logprobs", "needs logprobs to be true")
        if request.logprobs:
            options["logprobs"] = request.top_logprobs or 0
        self.job = Job(
            model=request.model,
            prompts=[conversation_of(request)],
            options=options,
            count=request.n or 1,
            stream=bool(request.stream),
            structure=structure_of_fields(request),
            number=number,
        )
        self._has_logprobs = bool(request.logprobs)
        self._has_token_ids = bool(request.return_token_ids)
        self.token_text: TokenTexts = NoTokenTexts()
        self._places: dict[int, TokenPlaces] = {}
        self.begin(
            {
                "id": f"chatcmpl-{number}",
                "created": int(time.time()),
                "model": request.model or model,
            }
        )

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response."""
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(*each) for each in enumerate(answers)],
            "usage": usage_body(usage),
            **self._prompt_logprobs(answers[0]),
        }

    def _prompt_logprobs(self, answer: Answer) -> dict[str, Any]:
        if answer.prompt is None:
            return {}
        scores = answer.prompt.logprobs
        return {"prompt_logprobs": prompt_logprobs(scores, self.token_text)}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content if answer.content or not answer.calls else None,
            "refusal": None,
            "annotations": [],
        }
        if answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(index, answer),
            "finish_reason": FINISH_REASONS[answer.finish_reason],
        }
        if self._has_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _logprobs(self, index: int, part: Answer | Delta) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if index not in self._places:
            skip_special = self.job.options["skip_special_tokens"]
            places = TokenPlaces(self.token_text, skip_special=skip_special)
            self._places[index] = places
        content = chat_logprobs(part.logprobs, self._places[index])
        return {"content": content, "refusal": None}

    def opening(self, usage: Usage) -> bytes:
        """Return a chunk with the role for each completion."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(index, delta, None, None, lambda: usage)
            for index in range(self.job.completions)
        )

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the chunk of a delta, or of its parts."""
        value: dict[str, Any] = {}
        if delta.content:
            value["content"] = delta.content
        if delta.reasoning:
            value["reasoning_content"] = value["reasoning"] = delta.reasoning
        if delta.calls:
            value["tool_calls"] = [_call_delta(part) for part in delta.calls]
        reason = delta.finish_reason and FINISH_REASONS[delta.finish_reason]
        extra: dict[str, Any] = {}
        if self._has_token_ids:
            extra["token_ids"] = delta.token_ids
        if not (value or reason or extra or delta.logprobs):
            return b""
        return self._chunk(
            index, value, self._logprobs(index, delta), reason, usage, extra
        )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None,
        usage: ReadUsage,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
            **(extra or {}),
        }
        return self.chunk(choice, usage)


def _call_delta(part: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.name is None:
        return {"index": part.index, "function": function}
    function = {"name": part.name, **function}
    return {
        "index": part.index, "id": part.id, "type": "function", "function": function
    }  # fmt: skip
