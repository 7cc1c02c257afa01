"""Conversations as token ids, with the model's own chat template."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
from inl.text.control_tokens import CLOSE, OPEN, MarkedMessages, encode_marked
from inl.text.measure import check_length

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


def chat_ids(
    model: LanguageModel,
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: str | Sequence[Mapping[str, Any]],
    *,
    context: int,
    trust_control_tokens: bool = False,
    continue_final: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's answer.

    messages: dicts with "role" and "content"; a string is one user message. context:
    maximum number of tokens; a text that is far longer is not encoded.
    trust_control_tokens: whether control tokens in the messages are encoded as such,
    not as plain text; see :mod:`inl.text.control_tokens`. continue_final: whether the
    last message is the beginning of the answer. variables: further variables of the
    template, such as "tools".

    Raises :class:`~inl.errors.RequestError` if the model has no template or no message
    has content, :class:`~inl.errors.PromptTooLong`, and
    :class:`~inl.errors.TemplateError` if the template fails.
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
            f"prompt: found {messages[-1:]!r:.80}, needs at least one message with "
            "content"
        )
    given = [*messages, dict(variables or {})]
    if trust_control_tokens:
        text = _rendered(template, given, continue_final=continue_final)
        return _encoded(tokenizer, text, context, "")
    marked = MarkedMessages(given, tokenizer.control_tokens)
    text = _rendered(template, marked.messages, continue_final=continue_final)
    return _encoded(tokenizer, text, context, marked.mark if marked.any else "")


def _rendered(
    template: ChatTemplate, given: Sequence[Mapping[str, Any]], *, continue_final: bool
) -> str:
    """Render messages and, as their last item, the template's variables."""
    *messages, variables = given
    if not continue_final:
        return template.apply(messages, **variables)
    # The template's end of the last message begins behind this mark.
    end, last = f"{OPEN}{secrets.randbelow(10**15):015}{CLOSE}", dict(messages[-1])
    last["content"] = f"{last['content']}{end}"
    variables = {**variables, "add_generation_prompt": False}
    text, found, _ = template.apply([*messages[:-1], last], **variables).rpartition(end)
    if not found:
        raise RequestError(
            f"{template.where}: does not render the last message; pass a conversation "
            "that ends with a user message"
        )
    return text


def _encoded(tokenizer: Tokenizer, text: str, context: int, mark: str) -> list[int]:
    check_length(tokenizer, text, context)
    if mark:
        return encode_marked(tokenizer, text, mark)
    return tokenizer.encode(text, add_special=False)
