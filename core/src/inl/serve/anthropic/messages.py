"""``/v1/messages``: its requests, as jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from inl.engine.options import GenerationOptions
from inl.serve.api_error import ApiError, unsupported
from inl.serve.job import Conversation, Job, Tool
from inl.serve.openai.messages import image_at
from inl.serve.remote_images import RemoteImage
from inl.serve.sampling import Count, StopString, TopK, TopP, sampling_options
from inl.serve.structured import structure_of

BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""First line of the system prompt of a coding client. It changes with each turn, so
that no prompt would begin like an earlier one."""


class Source(msgspec.Struct, kw_only=True):
    """The data of an image or a document."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str | None = None
    content: Any = None


class Block(msgspec.Struct, kw_only=True):
    """A content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Any = None
    is_error: bool | None = None
    source: Source | None = None
    title: str | None = None
    context: str | None = None
    citations: Any = None


class Turn(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolSchema(msgspec.Struct):
    """A tool; ones with another type run at Anthropic and are refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = "custom"


class ToolChoice(msgspec.Struct):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/messages/count_tokens``. Some fields have no effect here."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolSchema] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/messages``."""

    max_tokens: Count
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: list[StopString] | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


def job_of(request: MessagesRequest, number: str) -> Job:
    """Return the job of a request; raises :class:`ApiError`."""
    options: GenerationOptions = {
        **sampling_options(request),
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
    }
    return Job(
        model=request.model,
        prompts=[conversation_of(request)],
        options=options,
        stream=bool(request.stream),
        structure=structure_of(_format_of(request.output_config)),
        number=number,
    )


def _format_of(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return Anthropic's output format as OpenAI describes it."""
    given = (config or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise unsupported("output_config.format", f"found {given!r:.80}")
    schema = {"name": "output", "strict": True, "schema": given.get("schema")}
    return {"type": "json_schema", "json_schema": schema}


def conversation_of(request: CountRequest) -> Conversation:
    """Return the conversation of a request; raises :class:`ApiError`."""
    messages: list[dict[str, Any]] = []
    if system := _system_text(request.system):
        messages.append({"role": "system", "content": system})
    for at, turn in enumerate(request.messages):
        messages += _messages(turn, f"messages[{at}]")
    if not messages:
        raise ApiError(400, "messages: found no content", param="messages")
    tools = _tools_of(request.tools)
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking.type != "disabled"
    if effort := (request.output_config or {}).get("effort"):
        variables["reasoning_effort"] = effort
    choice = request.tool_choice
    return Conversation(
        messages,
        tools,
        _choice_of(choice, tools),
        variables=variables,
        parallel_calls=choice is None or choice.disable_parallel_tool_use is not True,
        # A last turn of the assistant is the beginning of the answer.
        continue_final=request.messages[-1].role == "assistant",
    )


def _system_text(system: str | list[Block] | None) -> str:
    texts = [system] if isinstance(system, str) else _texts(system or (), "system")
    stripped = [BILLING_LINE.sub("", text) for text in texts]
    return "\n".join(text for text in stripped if text)


def _texts(blocks: Sequence[Block], where: str) -> list[str]:
    for at, block in enumerate(blocks):
        if block.type != "text":
            raise _unsupported_block(block.type, f"{where}[{at}]")
    return [block.text or "" for block in blocks]


def _unsupported_block(kind: str, where: str) -> ApiError:
    return unsupported(where, f"found a block of type {kind!r:.40}, which is none here")


def _messages(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    """Yield a turn as messages of chat templates; tool results are messages too."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(turn.content):
        place = f"{where}.content[{at}]"
        if block.type == "text":
            texts.append(block.text or "")
            parts.append({"type": "text", "text": block.text or ""})
        elif block.type in ("image", "document") and turn.role == "user":
            found = _parts([block], place, at=None)
            parts += found
            texts += [part["text"] for part in found if part["type"] == "text"]
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _result(block.content, place),
            }
        elif block.type != "redacted_thinking":
            raise _unsupported_block(block.type, place)
    message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if _has_images(parts):
        message["content"] = parts
    if parts or calls:
        yield message


def _has_images(parts: Sequence[Mapping[str, Any]]) -> bool:
    return any(part["type"] == "image" for part in parts)


def _parts(
    blocks: Sequence[Block], where: str, *, at: int | None = 0
) -> list[dict[str, Any]]:
    """Return texts, images and documents as parts of chat templates.

    at: number of the first block in ``where``; ``None``: it is the place of the only
    one. Raises :class:`ApiError` for others.
    """
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks, at or 0):
        place = where if at is None else f"{where}[{number}]"
        if block.type == "text":
            parts.append({"type": "text", "text": block.text or ""})
        elif block.type == "image":
            parts.append({"type": "image", "image": _image_of(block, place)})
        elif block.type == "document":
            parts += _document(block, place)
        else:
            raise _unsupported_block(block.type, place)
    return parts


def _document(block: Block, where: str) -> list[dict[str, Any]]:
    """Return a document of texts and images, behind its title and its context."""
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        raise unsupported(
            f"{where}.citations", "is not supported; leave it out or disable it"
        )
    source = block.source
    if source is not None and source.type == "text":
        parts = [{"type": "text", "text": source.data}]
    elif source is not None and source.type == "content":
        inner = _blocks(source.content, where)
        if any(each.type == "document" for each in inner):
            raise unsupported(where, "found a document in a document")
        parts = _parts(inner, f"{where}.source.content")
    else:
        kind = "none" if source is None else source.type
        raise unsupported(
            where, f"found a document with source {kind!r:.40}, accepts text or content"
        )
    heads = [text for text in (block.title, block.context) if text]
    return [*({"type": "text", "text": text} for text in heads), *parts]


def _blocks(content: Any, where: str) -> list[Block]:
    """Return the blocks of a content, which may be a text."""
    if content is None or isinstance(content, str):
        return [Block(type="text", text=content)] if content else []
    try:
        return msgspec.convert(content, list[Block])
    except msgspec.ValidationError as error:
        raise unsupported(where, f"{error}; accepts a text or blocks") from error


def _image_of(block: Block, where: str) -> str | RemoteImage:
    """Return an image; raises :class:`ApiError`."""
    source = block.source
    if source is not None and source.type == "url":
        return image_at(source.url, where)
    if source is None or source.type != "base64":
        kind = "none" if source is None else source.type
        raise unsupported(
            where, f"found an image with source {kind!r:.40}, accepts base64 or url"
        )
    return image_at(f"data:{source.media_type};base64,{source.data}", where)


def _result(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the result of a tool: a text, or parts if it has images."""
    parts = _parts(_blocks(content, where), where)
    return parts if _has_images(parts) else "\n".join(part["text"] for part in parts)


def _tools_of(tools: Sequence[ToolSchema] | None) -> list[Tool]:
    for at, tool in enumerate(tools or ()):
        if tool.type not in (None, "custom"):
            raise unsupported(
                f"tools[{at}]", f"found type {tool.type!r:.40}, accepts 'custom'"
            )
    return [
        Tool(tool.name, tool.description or "", tool.input_schema or {})
        for tool in tools or ()
    ]


def _choice_of(choice: ToolChoice | None, tools: Sequence[Tool]) -> str:
    if choice is None:
        return "auto"
    if choice.type in ("auto", "none"):
        return choice.type
    if not tools:
        raise unsupported("tool_choice", f"{choice.type!r} needs tools")
    if choice.type == "any":
        return "required"
    if choice.name not in [tool.name for tool in tools]:
        raise unsupported("tool_choice", f"found {choice.name!r:.60}, which is no tool")
    return f"tool:{choice.name}"
