"""The text of an output with special tokens: what is searched, and what is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.engine.output_text import OutputText, without
from inl.engine.request_handle import RequestHandle
from inl.scheduling.request import Event, Request
from inl.text.detokenize import Detokenizer

STOPS = ["<|", "end|>a", "s>", "b</s", "<|im_end|>", "</s>", "ab", "é"]


@pytest.fixture(scope="session", params=["default", "fallback"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")


def drawn_ids(data, tokenizer):
    special = sorted(tokenizer.special_ids)
    letters = [i for text in ("a", "b", "é", " a", "<") for i in tokenizer.encode(text)]
    some = st.sampled_from(special) | st.sampled_from(letters)
    return data.draw(st.lists(some | st.integers(0, 300), max_size=30))


def arrivals(data, ids):
    """Yield the tokens so far, as they arrive in parts, and whether they are all."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    for cut in cuts:
        yield ids[:cut], False
    yield ids, True


def text_of(tokenizer, ids):
    """Return the text with special tokens: each breaks the text around it."""
    plain = Detokenizer(tokenizer)
    parts = []
    for index in ids:
        if index in tokenizer.special_ids:
            parts += [plain.complete(), tokenizer.token(index)]
        else:
            parts.append(plain.add(index))
    return "".join([*parts, plain.finish()])


@examples(60, 300)
@given(data=st.data())
def test_text_is_without_special_tokens_in_any_parts(tokenizer, data):
    ids = [i for i in drawn_ids(data, tokenizer) if not tokenizer.is_byte(i)]
    shown, whole = OutputText(tokenizer, ()), OutputText(tokenizer, ())
    taken, texts, kept = "", "", ""
    for known, ended in arrivals(data, ids):

        def rest(start, known=known):
            return known[start:]

        taken += shown.take(rest, ended=ended)
        text, spans = whole.take_whole(rest, ended=ended)
        texts += text
        kept += without(text, spans)
    expected = tokenizer.decode(ids, skip_special=True)
    assert (
        taken == kept == shown.read(lambda start: ids[start:], ended=True) == expected
    )
    assert texts == text_of(tokenizer, ids)


@examples(60, 300)
@given(data=st.data(), stop=st.sampled_from(STOPS))
def test_stop_strings_are_found_in_special_tokens(tokenizer, data, stop):
    ids = drawn_ids(data, tokenizer)
    output = OutputText(tokenizer, (stop,), skip_special=False)
    texts = ""
    for known, ended in arrivals(data, ids):
        texts += output.take(lambda start, known=known: known[start:], ended=ended)
    whole = text_of(tokenizer, ids)
    assert texts == whole.split(stop)[0]
    assert output.stop_string == (stop if stop in whole else None)


def test_a_special_token_may_complete_a_stop_string(tokenizer):
    special = min(tokenizer.special_ids)
    text = tokenizer.token(special)
    (letter,) = tokenizer.encode("a", add_special=False)[-1:]
    output = OutputText(tokenizer, (f"a{text}",))
    assert output.may_stop(special)
    assert output.take(lambda start: [letter, special][start:], ended=False) == ""
    assert output.stop_string == f"a{text}"


def test_a_request_of_no_token_drops_the_one_of_its_step(default_tokenizer):
    request = Request([1], max_tokens=1)
    handle = RequestHandle(request, default_tokenizer, (), 0.0, is_empty=True)
    assert handle.apply_event(Event(0, 5, "length"), 1.0)
    found = handle.completion()
    assert (found.text, found.token_ids, found.finish_reason) == ("", (), "length")
