"""``/api/chat`` and ``/api/generate``: their requests, as jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from inl.serve.api_error import unsupported
from inl.serve.job import Conversation, Gap, Job, Prompt
from inl.serve.ollama.fields import (
    GenerationFields,
    options_of,
    seconds_of,
    served_name,
    structure_of,
    variables_of,
    with_images,
)
from inl.serve.openai.fields import TokenId
from inl.serve.openai.messages import ToolSchema, tools_of


class OllamaFunctionCall(msgspec.Struct):
    """A call in an earlier answer."""

    name: str
    arguments: dict[str, Any] = {}  # msgspec copies it


class OllamaToolCall(msgspec.Struct):
    """A tool call in an earlier answer."""

    function: OllamaFunctionCall
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/api/chat``; without messages it only loads the model."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolSchema] | None = None


class GenerateRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/api/generate``; without a prompt it only loads the model.

    context: what an earlier answer returned; raw: whether the prompt is no message.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[TokenId] | None = None
    raw: bool | None = None
    images: list[str] | None = None


def chat_job(request: OllamaChatRequest, number: str) -> Job:
    """Return the job of a request; raises :class:`ApiError`."""
    if not request.messages:
        return load_job(request, number)
    conversation = Conversation(
        template_messages(request.messages),
        tools_of(request.tools),
        variables=variables_of(request),
        # A last message of the assistant is the beginning of the answer.
        continue_final=request.messages[-1].role == "assistant",
    )
    return _job(request, conversation, number)


def generate_job(request: GenerateRequest, number: str) -> Job:
    """Return the job of a request; raises :class:`ApiError`."""
    if request.template:
        raise unsupported("template", "is not supported; the model's own is used")
    if not request.prompt:
        return load_job(request, number)
    if request.suffix:
        for name in ("system", "context", "raw", "images"):
            if getattr(request, name):
                raise unsupported(name, "is not supported together with suffix")
        return _job(request, Gap(request.prompt, request.suffix), number)
    if not request.raw:
        return _job(request, _conversation(request, request.prompt), number)
    for name in ("system", "context", "images"):
        if getattr(request, name):
            raise unsupported(name, "is not supported together with raw")
    return _job(request, request.prompt, number)


def _conversation(request: GenerateRequest, prompt: str) -> Conversation:
    content = with_images(prompt, request.images, "images")
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    variables = variables_of(request)
    return Conversation(messages, variables=variables, context=request.context or ())


def load_job(request: GenerationFields, number: str) -> Job:
    """Return a job that loads the model, and whose one token is not shown."""
    if seconds_of(request.keep_alive) == 0:
        raise unsupported(
            "keep_alive",
            "found 0 without a prompt, which would unload the model; this server "
            "unloads models after --idle-unload seconds, or by /sleep",
        )
    name, stream = served_name(request.model), request.stream is not False
    return Job(name, [[0]], {"max_tokens": 1}, stream=stream, number=number)


def is_load(job: Job) -> bool:
    """Whether a job only loads the model."""
    return job.prompts == [[0]]


def _job(request: GenerationFields, prompt: Prompt, number: str) -> Job:
    seconds_of(request.keep_alive)
    return Job(
        model=served_name(request.model),
        prompts=[prompt],
        options=options_of(request),
        stream=request.stream is not False,
        structure=structure_of(request),
        number=number,
    )


def template_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages for a chat template; raises :class:`ApiError`.

    Calls without an id get one, and results are of the calls in their order: Ollama's
    messages need no ids, some templates do.
    """
    made: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    count = 0
    for at, message in enumerate(messages):
        where = f"messages[{at}].images"
        if message.images and message.role != "user":
            raise unsupported(where, f"found some of role {message.role!r}, not 'user'")
        content = with_images(message.content or "", message.images, where)
        value: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            value["reasoning_content"] = message.thinking
        if message.role == "tool":
            value |= _result_of(message, open_calls)
        calls = []
        for call in message.tool_calls or ():
            count += 1
            function = {
                "name": call.function.name,
                "arguments": call.function.arguments,
            }
            number = call.id or f"{count:09d}"
            open_calls.append((number, call.function.name))
            calls.append({"id": number, "type": "function", "function": function})
        if calls:
            value["tool_calls"] = calls
        made.append(value)
    return made


def _result_of(
    message: OllamaMessage, open_calls: list[tuple[str, str]]
) -> dict[str, Any]:
    """Return the id and the name of a result's call, which is open no more."""
    named = [
        each
        for each in open_calls
        if each[0] == message.tool_call_id or each[1] == message.tool_name
    ]
    found = (named or open_calls or [(message.tool_call_id or "", "")])[0]
    if found in open_calls:
        open_calls.remove(found)
    return {"tool_call_id": found[0], "name": message.tool_name or found[1]}
