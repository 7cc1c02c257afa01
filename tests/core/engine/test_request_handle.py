"""Incremental text of a request: stop strings and whole characters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.engine.request_handle import RequestHandle
from inl.errors import RequestError, RunnerError, WorkerLost
from inl.scheduling.request import Event, Request
from inl.spec.dispatch import noting
from inl.spec.kernel import Kernel
from inl.text.detokenize import Detokenizer
from inl.text.tokenizer import Tokenizer

PIECES = ["a", "b", "ab", "aba", "c", "é", "a€", "\U0001f600", " "]


def pieces_as_tokens():
    """A tokenizer of single bytes and a few overlapping strings."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spelled = [level.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    names = list(dict.fromkeys([*spelled, *alphabet]))
    rules = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: at for at, name in enumerate(names)}, [])
    )
    rules.pre_tokenizer = level
    rules.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(rules), names


TOKENIZER, NAMES = pieces_as_tokens()
# Bytes of characters often, so that some are completed and some are not.
BYTES = [NAMES.index(name) for name in ("Ã", "©", "â", "Ĥ", "¬", "ð", "Ł", "ĺ", "Ģ")]
ids = st.lists(
    st.integers(0, len(PIECES) - 1) | st.sampled_from(BYTES), min_size=1, max_size=30
)
stops = st.lists(
    st.text(st.sampled_from("abcé€ \U0001f600\ufffd"), min_size=1, max_size=5),
    max_size=4,
)


def cut(text, stops):
    """The text before the first complete stop string, and whether there is one."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def handle_of(tokens, stops, *, pieces=None):
    """A handle with these tokens, finished unless a stop string ended it."""
    answer = RequestHandle(Request([0]), TOKENIZER, tuple(stops), 0.0)
    for token in tokens:
        answer.apply_event(Event(1, token), 1.0)
        if pieces is not None:
            pieces.append(answer.take())
        if answer.stopped:
            return answer
    answer.apply_event(Event(1, None, "length"), 2.0)
    if pieces is not None:
        pieces.append(answer.take())
    return answer


@given(ids, st.lists(st.booleans(), min_size=30, max_size=30))
def test_text_does_not_depend_on_when_it_is_read(tokens, looks):
    answer = RequestHandle(Request([0]), TOKENIZER, (), 0.0)
    pieces = []
    for token, look in zip(tokens, looks, strict=False):
        answer.apply_event(Event(1, token), 1.0)
        if look:
            pieces.append(answer.take())
    answer.apply_event(Event(1, 0, "stop"), 2.0)
    assert "".join([*pieces, answer.take()]) == answer.text
    assert answer.text == TOKENIZER.decode(tokens)
    assert answer.token_ids == [*tokens, 0]


def test_tokens_are_decoded_only_when_text_is_read(monkeypatch):
    decoded = []
    monkeypatch.setattr(
        Tokenizer, "token_bytes", lambda _, index: decoded.append(index) or b"x"
    )
    answer = handle_of([1, 2, 3], [])
    assert decoded == []
    assert answer.completion().text == answer.text == "xxx"
    assert decoded == [1, 2, 3]


def test_concurrent_readers_get_all_of_the_text():
    answer = RequestHandle(Request([0]), TOKENIZER, (), 0.0)
    tokens = [number % len(PIECES) for number in range(20_000)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(_takes, answer) for _ in range(3)]
        for token in tokens:
            answer.apply_event(Event(1, token), 1.0)
        answer.apply_event(Event(1, None, "length"), 2.0)
        for each in running:
            each.result()
    assert answer.text == TOKENIZER.decode(tokens)


def _takes(answer):
    while not answer.completed:
        answer.take()


@examples(100, 500)
@given(ids, stops)
def test_streamed_text_ends_before_the_first_stop_string(tokens, stops):
    pieces = []
    answer = handle_of(tokens, stops, pieces=pieces)
    # Invalid bytes are decoded as they arrive, so the reference decodes only the tokens
    # that the handle received before it finished.
    text, stopped = cut(TOKENIZER.decode(answer.token_ids), stops)
    assert answer.text == text
    assert (answer.finish_reason == "stop") == stopped
    assert "".join(pieces) == text


@examples(100, 500)
@given(ids, stops)
def test_a_stop_string_ends_the_output_at_once_if_nobody_reads(tokens, stops):
    read, unread = handle_of(tokens, stops, pieces=[]), handle_of(tokens, stops)
    assert unread.token_ids == read.token_ids
    assert (unread.text, unread.finish_reason) == (read.text, read.finish_reason)


def test_tokens_that_end_no_stop_string_are_not_decoded(monkeypatch):
    decoded, extend = [], Detokenizer.extend

    def noted(self, ids):
        decoded.append([NAMES[index] for index in ids])
        return extend(self, ids)

    monkeypatch.setattr(Detokenizer, "extend", noted)
    answer = handle_of(map(NAMES.index, "cbcbabc"), ["xa", "ba"])
    assert answer.text == "cbc"
    assert decoded == [["c"], ["b", "c", "b", "a"]]


@given(ids, stops)
def test_text_only_grows(tokens, stops):
    shown, final = "", handle_of(tokens, stops).text
    answer = RequestHandle(Request([0]), TOKENIZER, tuple(stops), 0.0)
    for token in tokens:
        if answer.stopped:
            break
        answer.apply_event(Event(1, token), 1.0)
        shown += answer.take()
        assert final.startswith(shown)
        assert answer.text == shown


@given(ids)
def test_only_whole_characters_are_redecoded(tokens):
    pieces = []
    handle_of(tokens, (), pieces=pieces)
    whole = TOKENIZER.decode(tokens)
    assert "".join(pieces) == whole
    # A replacement character is shown only where the whole text has one.
    assert "".join(pieces).count("\ufffd") == whole.count("\ufffd")


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("aabaa", ["aa"], ""),
        ("abab c", ["ba", "abab"], "a"),
        ("xxabc", ["bc", "abc"], "xx"),
        ("ab", ["abc"], "ab"),
        ("é", ["\ufffd"], "é"),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(text, stops, shown):
    assert handle_of(TOKENIZER.encode(text), stops).text == shown


def test_the_error_names_the_kernel_that_raised():
    def rope(q, k, cos, sin):
        raise ValueError("boom")

    answer = RequestHandle(Request([0]), TOKENIZER, (), 0.0)
    with pytest.raises(ValueError, match="boom") as caught:
        noting(Kernel("rope", "toy", rope))(1, 2, 3, 4)
    caught.value.add_note("printed by a framework")
    answer.fail(caught.value)
    with pytest.raises(RunnerError) as told:
        answer.completion()
    assert str(told.value) == "generation failed: boom (in kernel rope/toy)"


def test_a_handle_finishes_once_and_raises_its_error():
    reasons = []
    answer = RequestHandle(Request([0]), TOKENIZER, (), 0.0)
    answer.listener = lambda: reasons.append(answer.finish_reason)
    answer.apply_event(Event(1, 0), 1.0)
    answer.fail(WorkerLost("gone"))
    answer.fail(RequestError("late"))
    assert reasons == [None, "error"]
    with pytest.raises(WorkerLost, match="generation failed: gone"):
        answer.completion()
    for error, kind in (
        (OSError("pipe"), RunnerError),
        (RequestError("no"), RequestError),
    ):
        answer = RequestHandle(Request([0]), TOKENIZER, (), 0.0)
        answer.fail(error)
        with pytest.raises(kind):
            answer.completion()
