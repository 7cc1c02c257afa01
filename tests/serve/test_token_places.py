"""Tokens of log-probabilities: their names, bytes and places join to the text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import decode
from tokenizers import decoders, models

from depth import examples
from inl.engine.answers.markup import CallMarkup, ReasoningMarkup
from inl.engine.answers.markup_parser import MarkupParser
from inl.engine.answers.model_text import VocabularyTexts
from inl.engine.output_text import OutputText
from inl.scheduling.sampling_params import TokenLogprob
from inl.serve.generations import Generation
from inl.serve.openai.usage import chat_logprobs, completion_logprobs
from inl.serve.token_texts import TokenPlaces, token_name
from inl.text.detokenize import Detokenizer
from inl.text.spelling import LETTERS
from inl.text.tokenizer import Tokenizer


def piece_tokenizer():
    """A vocabulary like Llama 2's: U+2581 for spaces, and byte fallback."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁a", "▁red", "a", "é", "日"]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True)
    rules = tokenizers.Tokenizer(model)
    rules.add_special_tokens(["<unk>", "<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rules.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(rules)


def reasoning_tokenizer():
    """The same, with a mark of the reasoning."""
    rules = piece_tokenizer().rules
    rules.add_special_tokens(["<think>"])
    return Tokenizer(rules)


def byte_ids(text):
    """Return the byte tokens of a text in the vocabulary of pieces."""
    return [2 + byte for byte in text.encode()]


def letter_tokenizer():
    """A byte-level vocabulary, some tokens of which are parts of characters."""
    tokens = [
        *LETTERS,
        *("".join(LETTERS[b] for b in t.encode()) for t in ("日本", " a")),
    ]
    rules = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    rules.add_special_tokens(["<s>"])
    rules.decoder = decoders.ByteLevel()
    return Tokenizer(rules)


TOKENIZERS = {"pieces": piece_tokenizer(), "letters": letter_tokenizer()}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


def texts_of(tokenizer):
    return VocabularyTexts(SimpleNamespace(tokenizer=tokenizer))


def tokens_of(tokenizer, text):
    """Return ids whose text is ``text``, of pieces, letters and single bytes."""
    known = {tokenizer.token(i): i for i in range(tokenizer.vocab_size)}
    ids = []
    for letter in text:
        spelled = "▁" if letter == " " else letter
        if not tokenizer.byte_level and spelled in known:
            ids.append(known[spelled])
            continue
        names = (
            LETTERS[byte] if tokenizer.byte_level else f"<0x{byte:02X}>"
            for byte in letter.encode()
        )  # fmt: skip
        ids += [known[name] for name in names]
    return ids


def scored(ids, top=()):
    return [TokenLogprob(i, -1.0, tuple((t, -2.0) for t in top)) for i in ids]


WORDS = st.lists(st.sampled_from(["a", " ", "é", "日", "€", "🙂", "\n"]), max_size=12)


@examples(60, 300)
@given(data=st.data(), words=WORDS)
def test_bytes_join_to_the_text_and_places_fit_it(tokenizer, data, words):
    ids = tokens_of(tokenizer, "".join(words))
    special = min(tokenizer.special_ids)
    for at in data.draw(st.lists(st.integers(0, len(ids)), max_size=2)):
        ids.insert(at, special)
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.extend(ids) + detokenizer.finish()
    entries = chat_logprobs(scored(ids, ids[:2]), TokenPlaces(texts_of(tokenizer)))
    assert (
        bytes(b for entry in entries for b in decode(entry)["bytes"]) == text.encode()
    )
    cut = data.draw(st.integers(0, len(ids)))
    places = TokenPlaces(texts_of(tokenizer))
    parts = [completion_logprobs(scored(p), places) for p in (ids[:cut], ids[cut:])]
    names = parts[0]["tokens"] + parts[1]["tokens"]
    offsets = parts[0]["text_offset"] + parts[1]["text_offset"]
    for token, name, offset in zip(ids, names, offsets, strict=True):
        is_whole = not name.startswith("bytes:") and token != special
        assert not is_whole or text.startswith(name, offset)
    assert places.offset == len(text)


def test_parts_of_a_character_stand_where_it_does(tokenizer):
    ids = tokens_of(tokenizer, "a€a")
    places = TokenPlaces(texts_of(tokenizer))
    found = completion_logprobs(scored(ids, ids), places)
    parts = [r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]
    assert found["tokens"] == ["a", *parts, "a"]
    assert found["text_offset"] == [0, 1, 1, 1, 2]
    assert set(decode(found["top_logprobs"][2])) == {"a", *parts}


def test_pieces_keep_their_blanks_but_at_the_beginning():
    tokenizer = TOKENIZERS["pieces"]
    red = tokenizer.token_id("▁red")
    found = completion_logprobs(
        scored([red, red], [red]), TokenPlaces(texts_of(tokenizer))
    )
    assert found["tokens"] == ["red", " red"]
    assert found["text_offset"] == [0, 3]
    assert [list(decode(top)) for top in found["top_logprobs"]] == [
        ["red"],
        [" red"],
    ]


def test_names_of_parts_keep_visible_letters():
    assert token_name(b" a\\\xe2\x82") == r"bytes: a\x5c\xe2\x82"
    assert token_name("é".encode()) == "é"


class WholeText:
    """A handle whose text arrives with its tokens, ``size`` at a time."""

    def __init__(self, tokenizer, ids):
        self.request = SimpleNamespace(prompt_logprobs=None, logprobs=None)
        self.token_ids, self.finish_reason, self.error = [], None, None
        self.ids, self._text = ids, OutputText(tokenizer, ())

    @property
    def completed(self):
        return self.finish_reason is not None

    def advance(self, size):
        self.token_ids = self.ids[: len(self.token_ids) + size]

    def take_whole(self):
        return self._text.take_whole(lambda at: self.token_ids[at:], ended=False)


@given(st.lists(st.integers(1, 7), max_size=40), st.booleans())
def test_reasoning_tokens_do_not_depend_on_how_they_arrive(sizes, has_special_mark):
    tokenizer = reasoning_tokenizer()
    ends = [tokenizer.token_id("<s>")] if has_special_mark else byte_ids("</think>")
    begun = [tokenizer.token_id("<think>"), tokenizer.token_id("▁red")]
    ids = [*begun, *byte_ids("日"), tokenizer.token_id("▁a"), *ends, begun[1], begun[1]]
    handle = WholeText(tokenizer, ids)
    mark = "<s>" if has_special_mark else "</think>"
    parser = MarkupParser(None, ReasoningMarkup(end=mark))
    answer = Generation(handle, parser, None, texts_of(tokenizer), first=handle)
    for size in [*sizes, len(ids)]:
        handle.advance(size)
        answer.poll()
    assert answer.reasoning_tokens == len(ids) - 2


def test_reasoning_is_counted_once_for_each_token():
    tokenizer = reasoning_tokenizer()
    red = tokenizer.token_id("▁red")
    ids = [tokenizer.token_id("<think>"), *[red] * 500, *byte_ids("</think>"), red, red]
    read = []

    class Texts(VocabularyTexts):
        def __call__(self, token):
            read.append(token)
            return super().__call__(token)

    handle = WholeText(tokenizer, ids)
    parser = MarkupParser(None, ReasoningMarkup())
    texts = Texts(SimpleNamespace(tokenizer=tokenizer))
    answer = Generation(handle, parser, None, texts, first=handle)
    for at in range(len(ids)):
        before = len(read)
        handle.advance(1)
        answer.poll()
        assert len(read) - before <= 2, at
    assert answer.reasoning_tokens == len(ids) - 2


@given(st.lists(st.integers(1, 9), max_size=40), st.booleans())
def test_an_only_call_ends_at_one_token_however_many_arrived(sizes, is_reasoning):
    """The engine is ahead of what was read, and goes on until it is stopped."""
    tokenizer = TOKENIZERS["letters"]
    call = tokens_of(tokenizer, '<tool_call>{"name": "f", "arguments": {"x": "é"}}')
    begun = tokens_of(tokenizer, "<think>aa</think>")
    used = [*begun, *call] if is_reasoning else call
    rest = tokens_of(tokenizer, "</tool_call>" + "a" * 40)
    handle = WholeText(tokenizer, [*used, *rest])
    handle.request.logprobs = 0
    handle.request.token_logprobs = scored(handle.ids)
    parser = MarkupParser(CallMarkup(), ReasoningMarkup(), one_call=True)
    stopped = []
    answer = Generation(
        handle, parser, stopped.append, texts_of(tokenizer), first=handle
    )
    for size in [*sizes, len(handle.ids)]:
        handle.advance(size)
        if answer.poll().finish_reason is not None:
            break
    handle.advance(7)  # of steps that were in flight
    assert stopped == [handle]
    assert answer.finish_reason == "tool_calls"
    assert answer.token_ids == used
    assert len(answer.logprobs) == answer.completion_tokens == len(used)
    assert answer.reasoning_tokens == (len(begun) if is_reasoning else 0)
