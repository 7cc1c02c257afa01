"""Chat messages of OpenAI's dialect, as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from inl.bounded_json import parse_json
from inl.errors import InvalidJson
from inl.images.frames import ACCEPTED, frame_uris
from inl.serve.api_error import ApiError, unsupported
from inl.serve.job import Tool
from inl.serve.remote_images import RemoteImage


class ImageUrl(msgspec.Struct):
    """The address of an image: a data URI, or at a host of --allow-image-hosts."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message: text, an image or the frames of a video."""

    type: str
    text: str | None = None
    image_url: str | ImageUrl | None = None
    video_url: str | ImageUrl | None = None
    """Frames in one data URI, see :mod:`inl.images.frames`."""
    video: list[str] | str | None = None
    """Addresses of frames, as those of images."""
    detail: str | None = None
    """Has no effect, as that of :class:`ImageUrl`: the model's files bound images."""


class FunctionCall(msgspec.Struct):
    """A call in an earlier answer; arguments: JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    """A tool call in an earlier answer."""

    id: str = ""
    type: str = "function"
    function: FunctionCall | None = None


class Message(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSchema(msgspec.Struct):
    """A function that the model may call; parameters: its JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSchema(msgspec.Struct):
    """A tool of a request."""

    function: FunctionSchema
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """The name of a function."""

    name: str


class AllowedTool(msgspec.Struct):
    """A tool that may be called: its name, in the object of chat completions or not."""

    type: Literal["function"] = "function"
    name: str | None = None
    function: NamedFunction | None = None


class AllowedTools(msgspec.Struct):
    """Tools of which one may, or must, be called."""

    tools: Annotated[list[AllowedTool], Meta(min_length=1)]
    mode: Literal["auto", "required"] = "auto"


class ToolChoice(msgspec.Struct):
    """The tool that must be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ToolUse(NamedTuple):
    """Tools of a job and how they are chosen, as fields of a conversation."""

    tools: Sequence[Tool]
    tool_choice: str = "auto"
    only_tools: bool = False


def text_of(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """Return the text of a message; raises :class:`ApiError` for other content."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise unsupported(
                f"{where}[{number}]",
                f"found a part of type {part.type!r:.40}, which is none here",
            )
        texts.append(part.text or "")
    return "\n".join(texts)


IMAGES = ("image_url", "input_image")
"""Types of the parts that are images."""
SHOWN = ("user", "tool", "function")
"""Roles whose messages may have images."""
VIDEOS = ("video_url", "video")
"""Types of the parts that are frames of a video, each of them an image."""


def content_of(
    content: str | Sequence[ContentPart] | None, where: str
) -> str | list[dict[str, Any]]:
    """Return the content of a user or a tool: text, or parts if it has images.

    Raises :class:`ApiError` for other parts, and for addresses of other schemes.
    """
    if not isinstance(content, list) or all(
        part.type not in IMAGES + VIDEOS for part in content
    ):
        return text_of(content, where)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        if part.type in VIDEOS:
            parts += [
                {"type": "image", "image": image_at(url, f"{place}.video[{frame}]")}
                for frame, url in enumerate(_frames(part, place))
            ]
            continue
        if part.type not in IMAGES:
            parts.append({"type": "text", "text": text_of([part], where)})
            continue
        given = part.image_url
        url = given.url if isinstance(given, ImageUrl) else given
        parts.append({"type": "image", "image": image_at(url, place)})
    return parts


def _frames(part: ContentPart, where: str) -> list[str]:
    """Return the addresses of a video's frames; raises :class:`ApiError`."""
    given = part.video if part.video is not None else part.video_url
    url = given.url if isinstance(given, ImageUrl) else given
    frames = frame_uris(url) if isinstance(url, str) else url
    if not frames:
        raise unsupported(where, f"found a video; accepts its {ACCEPTED}")
    return frames


def image_at(url: str | None, where: str) -> str | RemoteImage:
    """Return a data URI, or an image that is to be fetched if its host is listed.

    Raises :class:`ApiError` for other addresses.
    """
    if url is not None and url.startswith("data:image/"):
        return url
    if url is not None and url.lower().startswith(("http://", "https://")):
        return RemoteImage(url, where)
    raise unsupported(
        where,
        f"found an image at {url or 'no address'!r:.60}; accepts "
        "data:image/TYPE;base64,DATA",
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template; raises :class:`ApiError`."""
    if not messages:
        raise ApiError(400, "messages: found none, needs one", param="messages")
    return [_template_message(each, at) for at, each in enumerate(messages)]


def _template_message(message: Message, at: int) -> dict[str, Any]:
    where = f"messages[{at}]"
    role = "system" if message.role == "developer" else message.role
    value: dict[str, Any] = {
        "role": "tool" if role == "function" else role,
        "content": (content_of if role in SHOWN else text_of)(
            message.content, f"{where}.content"
        ),
    }
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        value["name"] = message.name
    if reasoning := message.reasoning_content or message.reasoning:
        value["reasoning_content"] = reasoning
    if message.tool_calls:
        value["tool_calls"] = [
            _template_call(each, where) for each in message.tool_calls
        ]
    return value


def _template_call(call: ToolCall, where: str) -> dict[str, Any]:
    if call.function is None:
        raise unsupported(f"{where}.tool_calls", f"found type {call.type!r:.40}")
    try:
        # Templates print arguments as JSON themselves.
        arguments = parse_json(call.function.arguments or "{}", where)
    except InvalidJson:
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def tools_of(tools: Sequence[ToolSchema] | None) -> list[Tool]:
    """Return the tools of a request."""
    return [
        Tool(
            each.function.name,
            each.function.description or "",
            each.function.parameters or {},
        )
        for each in tools or ()
    ]


def tool_use(
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    tools: Sequence[Tool],
) -> ToolUse:
    """Return the use of the tools of a request; raises :class:`ApiError`."""
    if choice is None:
        return ToolUse(tools)
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise unsupported("tool_choice", "'required' needs tools")
        return ToolUse(tools, choice)
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise unsupported("tool_choice", "'allowed_tools' needs allowed_tools")
        return allowed_use(choice.allowed_tools, tools)
    name = None if choice.function is None else choice.function.name
    return named_use(name, tools)


def named_use(name: str | None, tools: Sequence[Tool]) -> ToolUse:
    """Return the use of one tool that must be called; raises :class:`ApiError`."""
    if name not in [tool.name for tool in tools]:
        raise unsupported("tool_choice", f"found {name!r:.60}, which is no tool")
    return ToolUse(tools, f"tool:{name}")


def allowed_use(allowed: AllowedTools, tools: Sequence[Tool]) -> ToolUse:
    """Return the use of some of the tools; raises :class:`ApiError`."""
    names = {
        each.name if each.function is None else each.function.name
        for each in allowed.tools
    }
    if unknown := names - {tool.name for tool in tools}:
        name = next(iter(unknown))
        raise unsupported("tool_choice", f"found {name!r:.60}, which is no tool")
    some = [tool for tool in tools if tool.name in names]
    return ToolUse(some, allowed.mode, only_tools=True)
