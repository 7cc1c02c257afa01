from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.text.detokenize import Detokenizer

TEXT = "Ça coûte 10 € 🙂 — 日本語, 👩‍👩‍👧‍👦 and العربية.\n\tdef f(): pass"


def streamed(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.fixture(scope="session", params=["default", "fallback"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")


@examples(60, 300)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_equals_decode(tokenizer, data, skip):
    top = tokenizer.vocab_size + 3
    ids = data.draw(st.lists(st.integers(0, top) | st.integers(0, 300), max_size=60))
    expected = tokenizer.decode(ids, skip_special=skip)
    assert "".join(streamed(tokenizer, ids, skip_special=skip)) == expected


@examples(30, 100)
@given(data=st.data(), skip=st.booleans())
def test_extend_equals_repeated_add(tokenizer, data, skip):
    some = st.lists(st.integers(0, tokenizer.vocab_size + 3) | st.integers(0, 300))
    runs = data.draw(st.lists(some, max_size=6))
    ids = [index for run in runs for index in run]
    detokenizer = Detokenizer(tokenizer, skip_special=skip)
    found = "".join(map(detokenizer.extend, runs)) + detokenizer.finish()
    assert found == tokenizer.decode(ids, skip_special=skip)


@examples(50, 200)
@given(text=st.text(st.characters(codec="utf-8")) | st.text("é🙂日本 a👩‍"))
def test_emitted_text_has_no_partial_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    parts = streamed(tokenizer, ids, skip_special=False)
    assert "".join(parts) == tokenizer.decode(ids, skip_special=False)
    if "\ufffd" not in tokenizer.decode(ids, skip_special=False):
        assert not any("\ufffd" in part for part in parts)


def test_text_is_emitted_as_soon_as_it_is_complete(default_tokenizer):
    ids = default_tokenizer.encode(TEXT)
    detokenizer = Detokenizer(default_tokenizer)
    given_out = ""
    for count, index in enumerate(ids, 1):
        given_out += detokenizer.add(index)
        whole = b"".join(map(default_tokenizer.token_bytes, ids[:count]))
        assert given_out == whole.decode("utf-8", "ignore")
    assert detokenizer.finish() == ""
    assert given_out == TEXT


def test_byte_fallback_tokens_are_buffered_until_their_run_ends(fallback_tokenizer):
    smile = [fallback_tokenizer.token_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    letter = fallback_tokenizer.token_id("a")
    assert streamed(fallback_tokenizer, [letter, *smile, letter]) == [
        *("a", "", "", "", ""),
        "🙂a",
        "",
    ]


def test_an_incomplete_character_becomes_a_replacement_at_the_end(tokenizer):
    ids = tokenizer.encode("a\U0001fae8")[:-1]
    *first, last = streamed(tokenizer, ids)
    assert "".join(first) == "a"
    assert set(last) == {"\ufffd"}
    assert "a" + last == tokenizer.decode(ids)


class CountingTokenizer:
    """Counts the ids that are decoded."""

    def __init__(self, tokenizer):
        self._tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, **options)

    def token_bytes(self, index):
        self.decoded += 1
        return self._tokenizer.token_bytes(index)


@pytest.mark.parametrize("text", ["the ", "é", "🙂", "�"])
def test_work_is_linear(tokenizer, text):
    ids = tokenizer.encode(text * 1000)
    counting = CountingTokenizer(tokenizer)
    streamed(counting, ids)
    assert len(ids) <= counting.decoded < 30 * len(ids)
