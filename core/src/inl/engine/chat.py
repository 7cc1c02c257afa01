"""Conversations as token ids, with the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
from inl.text.continuation import Continuation, with_reasoning
from inl.text.control_tokens import MarkedMessages, encode_marked
from inl.text.measure import check_length
from inl.text.tokenizer import check_encodable

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


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
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | str = False,
    trust_control_tokens: bool = False,
    **template_kwargs: Any,
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's answer.

    messages: dicts with "role" and "content"; a string is one user message. context:
    maximum number of tokens; a text that is far longer is not encoded. tools: JSON
    schemas of functions that the model may call. documents: dicts with "title" and
    "text". add_generation_prompt: whether the prompt ends with the beginning of an
    assistant's message; by default it does unless a message is continued.
    continue_final_message: whether the answer continues the last message, whose end is
    not written then; a string names the continued field, such as "reasoning_content".
    template_kwargs: further variables of the template, such as
    ``enable_thinking=False``.
    trust_control_tokens: whether control tokens in the arguments are encoded as such,
    not as plain text; see :mod:`inl.text.control_tokens`.

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
    return _encoded(
        tokenizer, _rendered(template, said, continue_final_message), context, mark
    )


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
