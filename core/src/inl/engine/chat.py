"""Conversations as token ids, with the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


def chat_ids(
    model: LanguageModel,
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    messages: str | Sequence[Mapping[str, Any]],
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's answer.

    messages: dicts with "role" and "content"; a string is one user message. Raises
    :class:`~inl.errors.RequestError` if the model has no template or no message has
    content, and :class:`~inl.errors.TemplateError` if the template fails.
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
    text = template.apply(list(messages), add_generation_prompt=True)
    return tokenizer.encode(text, add_special=False)
