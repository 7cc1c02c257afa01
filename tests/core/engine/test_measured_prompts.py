"""Texts are measured before they are encoded: no work beyond the context."""

from __future__ import annotations

import pytest

from inl.cli.conversation import Conversation
from inl.engine.chat import chat_ids
from inl.errors import PromptTooLong
from inl.text.measure import PIECE, check_length
from inl.text.template import ChatTemplate


class Counting:
    """A tokenizer of one token per character, which counts what it encodes."""

    control_tokens = ()

    def __init__(self):
        self.characters = 0

    def encode(self, text, add_special=True, *, plain=False):
        self.characters += len(text)
        return [1] * len(text)


def test_digits_far_beyond_the_context_are_not_encoded():
    tokenizer = Counting()
    with pytest.raises(PromptTooLong) as caught:
        check_length(tokenizer, "7" * 2_000_000, 8192)
    for part in ("2000000 characters", "over ", "tokens", "the context holds 8192"):
        assert part in str(caught.value)
    assert tokenizer.characters <= 2 * 8192 + PIECE


def test_a_text_that_may_fit_is_left_to_encoding():
    tokenizer = Counting()
    check_length(tokenizer, "7" * 100_000, 99_999)
    check_length(tokenizer, "7" * PIECE, 10)
    assert tokenizer.characters == 100_000


def test_a_text_without_tokens_is_not_encoded_for_ever():
    class Silent(Counting):
        def encode(self, text, add_special=True, *, plain=False):
            super().encode(text)
            return []

    tokenizer = Silent()
    with pytest.raises(PromptTooLong, match="found 10000000 characters, accepts at"):
        check_length(tokenizer, "\0" * 10_000_000, 1024)
    assert tokenizer.characters == 0


@pytest.mark.parametrize("call", ["generate", "stream", "submit"])
def test_a_long_prompt_is_refused_by_its_length(engines, call, monkeypatch):
    engine = engines()
    encoded = []
    encode = type(engine.tokenizer).encode

    def counted(self, text, *args, **options):
        encoded.append(len(text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(type(engine.tokenizer), "encode", counted)
    with pytest.raises(PromptTooLong, match=r"found 2000000 characters.* holds 96 tok"):
        getattr(engine, call)("7" * 2_000_000)
    assert sum(encoded) <= 2 * PIECE
    assert len(engine.generate("7" * 50, max_tokens=1).token_ids) == 1


def test_a_template_with_a_long_output_is_not_encoded():
    class Model:
        name = "m"

    template = ChatTemplate(
        "{% for a in range(31) %}{{ '7' * 1000000 }}{% endfor %}"
        "{{ messages[0].content }}"
    )
    tokenizer = Counting()
    with pytest.raises(PromptTooLong, match="found 31000002 characters"):
        chat_ids(Model, template, tokenizer, "hi", context=131072)
    template.close()
    assert tokenizer.characters <= 2 * 131072 + PIECE


def test_a_conversation_drops_turns_that_are_too_long_to_encode():
    conversation = Conversation()
    conversation.ask("7" * 200_000)
    conversation.answer("no")
    conversation.ask("hi")

    def encode(messages):
        text = "".join(message["content"] for message in messages)
        check_length(Counting(), text, 100)
        return [1] * len(text)

    assert conversation.fit(encode, 50) == ([1, 1], 1)
    conversation.ask("7" * 200_000)
    with pytest.raises(PromptTooLong, match=r"found 200000 char.*raise --context"):
        conversation.fit(encode, 50)
