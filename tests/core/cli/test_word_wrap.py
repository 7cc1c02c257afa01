"""Streamed words on a terminal of few columns."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from inl.cli.word_wrap import WordWrap

TEXT = (
    "The sky appears blue because of Rayleigh scattering: molecules of air scatter "
    "shorter wavelengths, such as blue, more than longer ones, such as red.\n\n"
    "- one\n- an_identifier_that_is_longer_than_the_whole_line_of_forty_columns\n"
    "A line after it; the end."
)


def pieces(text, draw):
    while text:
        size = draw.randint(1, 7)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("columns", [20, 33, 40, 80])
@pytest.mark.parametrize("seed", range(5))
def test_no_word_is_broken(columns, seed):
    wrap = WordWrap(columns)
    shown = "".join(map(wrap, pieces(TEXT, random.Random(seed)))) + wrap.finish()
    assert max(map(len, shown.split("\n"))) <= columns
    words = TEXT.split()
    broken = [word for word in shown.split() if word not in words]
    assert all(any(word in each for each in words if len(each) > columns)
               for word in broken)  # fmt: skip
    assert "".join(shown.split()) == "".join(words)
    lines = shown.split("\n")
    for line, after in pairwise(lines):
        first = after.split(" ")[0]
        if line and first and f"{line.split(' ')[-1]} {first}" in TEXT:
            assert len(line.rstrip()) + 1 + len(first) > columns, "the word would fit"


def test_a_word_is_shown_when_it_ends():
    wrap = WordWrap(20)
    assert [wrap("one tw"), wrap("o "), wrap("three"), wrap.finish()] == [
        "one ",
        "two ",
        "",
        "three",
    ]


def test_wide_letters_break_anywhere():
    text = WordWrap(20)("\u5929" * 12)
    assert text == "\u5929" * 10 + "\n" + "\u5929" * 2


def test_an_accent_takes_no_column():
    text, wrap = "e\u0301" * 20, WordWrap(20)
    assert wrap(text) + wrap.finish() == text
    wrap = WordWrap(20)
    assert wrap(f"{text}e") + wrap.finish() == f"{text}\ne"


def test_a_narrow_terminal_breaks_words_itself():
    assert WordWrap(10)(TEXT) == TEXT
