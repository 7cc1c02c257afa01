"""Conversations as token ids, with the model's own chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
from inl.guidance.python_types import function_schema
from inl.text.continuation import Continuation, with_reasoning
from inl.text.control_tokens import MarkedMessages, encode_marked
from inl.text.measure import check_length
from inl.text.tokenizer import check_encodable

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


ToolSource = Mapping[str, Any] | Callable[..., Any]
"""A function as a tool: itself, or its schema as chat templates expect it."""


def tool_schemas(tools: Sequence[ToolSource]) -> list[dict[str, Any]]:
    """Return the schemas of tools: dicts as they are, of functions by their hints.

    A dict with a name and no "function" is taken for what "function" would hold. Raises
    :class:`~inl.errors.RequestError`.
    """
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence):
        raise RequestError(
            f"tools: found {tools!r:.60}, accepts a list of functions or JSON schemas"
        )
    return [_tool_schema(at, tool) for at, tool in enumerate(tools)]


def _tool_schema(at: int, tool: ToolSource) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        is_bare = "function" not in tool and isinstance(tool.get("name"), str)
        return {"type": "function", "function": dict(tool)} if is_bare else dict(tool)
    if not callable(tool):
        raise RequestError(
            f"tools[{at}]: found {tool!r:.60}, accepts a function or its JSON schema"
        )
    return function_schema(tool)


def prepare_chat(
    template: ChatTemplate | None, tokenizer: Tokenizer, *, with_tools: bool
) -> None:
    """Start what a first prompt waits for, a tenth of a second each, on two cores.

    with_tools: whether the prompt has tools. Raises as :func:`chat_ids`.
    """
    if template is not None:
        template.start(with_tools=with_tools)
    tokenizer.prepare()


def chat_ids(
    model: LanguageModel,
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: str | Sequence[Mapping[str, Any]],
    *,
    context: int,
    tools: Sequence[ToolSource] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | str = False,
    trust_control_tokens: bool = False,
    place_images: Callable[[str], str] | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's answer.

    messages: dicts with "role" and "content"; a string is one user message. context:
    maximum number of tokens; a text that is far longer is not encoded. tools:
    functions that the model may call, or their JSON schemas. documents: dicts with
    "title" and "text". add_generation_prompt: whether the prompt ends with the
    beginning of an assistant's message; by default it does unless a message is
    continued. continue_final_message: whether the answer continues the last message,
    whose end is not written then; a string names the continued field, such as
    "reasoning_content".
    template_kwargs: further variables of the template, such as
    ``enable_thinking=False``.
    trust_control_tokens: whether control tokens in the arguments are encoded as such,
    not as plain text; see :mod:`inl.text.control_tokens`. place_images: returns a text
    with what stands for images in place of what the template writes.

    Raises :class:`~inl.errors.RequestError` if the model has no template, no message
    has content or the template does not render a message to be continued,
    :class:`~inl.errors.PromptTooLong`, and :class:`~inl.errors.TemplateError` if the
    template fails.
    """
    if template is None:
        raise RequestError(
            f"{model.name}: has no chat template; pass plain text "
            "(on the command line: add --raw)"
        )
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not any(message.get("content") for message in messages):
        raise RequestError(
            "prompt: found no text; needs at least one message with content"
        )
    for message in messages:
        check_encodable(message.get("content"))
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message: found with add_generation_prompt=True, which "
            "begins another message; accepted: one of both"
        )
    if tools is not None:
        tools = [
            dict(tool) if isinstance(tool, Mapping) else schema
            for tool, schema in zip(tools, tool_schemas(tools), strict=True)
        ]
    used = template
    if tools is not None and template.tool_use is not None:
        used = template.tool_use
    said: dict[str, Any] = {
        **template_kwargs,
        "messages": used.shapes.fit(with_reasoning(messages)),
        "tools": tools,
        "documents": documents,
    }
    mark = ""
    if not trust_control_tokens:
        marked = MarkedMessages(said, tokenizer.control_tokens)
        said, mark = marked.values, marked.mark if marked.any else ""
    said["add_generation_prompt"] = (
        not continue_final_message
        if add_generation_prompt is None
        else add_generation_prompt
    )
    text = _rendered(template, said, continue_final_message)
    if place_images is not None:  # what reads like it in a message has a mark inside
        text = place_images(text)
    return _encoded(tokenizer, text, context, mark)


def _rendered(
    template: ChatTemplate, said: dict[str, Any], continued: bool | str
) -> str:
    messages = said.pop("messages")
    if not continued:
        return template.apply(messages, **said)
    field = continued if isinstance(continued, str) else "content"
    continuation = Continuation(messages, field)
    return continuation.cut(template.apply(continuation.messages, **said))


def _encoded(tokenizer: Tokenizer, text: str, context: int, mark: str) -> list[int]:
    check_length(tokenizer, text, context)
    if mark:
        return encode_marked(tokenizer, text, mark)
    return tokenizer.encode(text, add_special=False)
