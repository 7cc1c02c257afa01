"""Conversations as token ids, with the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError
from inl.text.control_tokens import MarkedMessages, encode_marked
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
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's answer.

    messages: dicts with "role" and "content"; a string is one user message. context:
    maximum number of tokens; a text that is far longer is not encoded.
    trust_control_tokens: whether control tokens in the messages are encoded as such,
    not as plain text; see :mod:`inl.text.control_tokens`.

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
    if trust_control_tokens:
        return _encoded(tokenizer, template.apply(messages), context, "")
    marked = MarkedMessages(messages, tokenizer.control_tokens)
    text = template.apply(marked.messages)
    return _encoded(tokenizer, text, context, marked.mark if marked.any else "")


def _encoded(tokenizer: Tokenizer, text: str, context: int, mark: str) -> list[int]:
    check_length(tokenizer, text, context)
    if mark:
        return encode_marked(tokenizer, text, mark)
    return tokenizer.encode(text, add_special=False)
