"""``/v1/responses``: its requests, as jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from inl.engine.options import GenerationOptions
from inl.serve.api_error import unsupported
from inl.serve.job import Conversation, Job, Tool
from inl.serve.openai.messages import (
    AllowedTool,
    AllowedTools,
    ContentPart,
    FunctionCall,
    Message,
    ToolCall,
    ToolUse,
    allowed_use,
    named_use,
    template_messages,
    tool_use,
)
from inl.serve.sampling import Count, Temperature, TopK, TopP, sampling_options
from inl.serve.structured import structure_of


class Item(msgspec.Struct, kw_only=True):
    """An item of the input: a message, a call, its result, or reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[ContentPart] = ""
    summary: list[ContentPart] | None = None


class ToolSchema(msgspec.Struct):
    """A tool; those of other types than "function" are ignored."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTools(msgspec.Struct):
    """The tool that must be called, or the tools that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Meta(min_length=1)] | None = None


class Reasoning(msgspec.Struct):
    """How much the model reasons."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct):
    """Structure of the output."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a response. Some fields have no effect here."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[ToolSchema] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def job_of(request: ResponsesRequest, number: str, earlier: Sequence[Item] = ()) -> Job:
    """Return the job of a request; raises :class:`ApiError`.

    earlier: items that an earlier response had read and written.
    """
    if request.conversation is not None:
        raise unsupported("conversation", "is not supported; use previous_response_id")
    if request.background:
        raise unsupported("background", "is not supported; use stream")
    options: GenerationOptions = {
        **sampling_options(request),
        "max_tokens": request.max_output_tokens,
    }
    if request.top_logprobs or has_logprobs(request):
        options["logprobs"] = request.top_logprobs or 0
    return Job(
        model=request.model,
        prompts=[_conversation_of(request, [*earlier, *input_items(request)])],
        options=options,
        stream=bool(request.stream),
        structure=structure_of(_format_of(request.text)),
        number=number,
    )


def has_logprobs(request: ResponsesRequest) -> bool:
    """Whether the response has log-probabilities."""
    return "message.output_text.logprobs" in (request.include or ())


def _format_of(text: TextOptions | None) -> dict[str, Any] | None:
    """Return the output format as chat completions describe it."""
    given = text.format if text else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {k: v for k, v in given.items() if k != "type"},
    }


def input_items(request: ResponsesRequest) -> list[Item]:
    """Return the items of the input; a text is a message of the user."""
    if isinstance(request.input, str):
        return [Item(content=request.input)]
    return request.input


def _conversation_of(request: ResponsesRequest, items: Sequence[Item]) -> Conversation:
    messages: list[Message] = []
    if request.instructions:
        messages.append(Message("system", request.instructions))
    messages += _messages(items)
    tools = [
        Tool(tool.name, tool.description or "", tool.parameters or {})
        for tool in request.tools or ()
        if tool.type == "function" and tool.name
    ]
    variables: dict[str, Any] = {}
    if request.reasoning is not None and request.reasoning.effort:
        effort = request.reasoning.effort
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return Conversation(
        template_messages(messages),
        *_tool_use(request.tool_choice, tools),
        variables=variables,
        parallel_calls=request.parallel_tool_calls is not False,
    )


def _messages(items: Sequence[Item]) -> list[Message]:
    """Return the messages of items; consecutive calls are one message."""
    messages: list[Message] = []
    reasoning: str | None = None
    for at, item in enumerate(items):
        if item.type == "message":
            messages.append(
                Message(item.role, item.content, reasoning_content=reasoning)
            )
        elif item.type == "function_call":
            call = ToolCall(item.call_id, "function", _function(item))
            if messages and messages[-1].role == "assistant":
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            else:
                messages.append(
                    Message(
                        "assistant", None, tool_calls=[call],
                        reasoning_content=reasoning,
                    )
                )  # fmt: skip
        elif item.type == "function_call_output":
            messages.append(Message("tool", item.output, tool_call_id=item.call_id))
        elif item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else item.summary
            reasoning = "\n".join(part.text or "" for part in parts or ())
            continue
        else:
            raise unsupported(f"input[{at}]", f"found type {item.type!r:.40}")
        reasoning = None
    return messages


def _function(item: Item) -> FunctionCall:
    return FunctionCall(item.name, item.arguments)


def _tool_use(
    choice: Literal["none", "auto", "required"] | ChosenTools | None,
    tools: Sequence[Tool],
) -> ToolUse:
    if choice is None or isinstance(choice, str):
        return tool_use(choice, tools)
    if choice.type == "allowed_tools":
        if choice.tools is None:
            raise unsupported("tool_choice", "'allowed_tools' needs tools")
        return allowed_use(AllowedTools(choice.tools, choice.mode), tools)
    return named_use(choice.name, tools)
