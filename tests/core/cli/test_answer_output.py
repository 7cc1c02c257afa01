"""Words on a terminal, and the line that reports a truncated answer."""

from __future__ import annotations

import random
import textwrap
from types import SimpleNamespace

import pytest

from inl.cli.answer_output import WordWrap, print_answer, truncation

TEXT = (
    "The quick brown fox jumps over the lazy dog, and nobody could say why it did so; "
    "but it did."
)


def wrapped(text, width, pieces=None):
    wrap = WordWrap(width)
    return "".join(map(wrap.feed, pieces or [text])) + wrap.end()


@pytest.mark.parametrize("width", [10, 17, 40, 80])
def test_lines_break_between_words(width):
    expected = textwrap.wrap(TEXT, width, break_on_hyphens=False)
    assert wrapped(TEXT, width).splitlines() == expected


def test_the_pieces_do_not_matter():
    whole = wrapped(f"{TEXT}\n\n  - {TEXT}", 24)
    draw = random.Random(5)
    for _ in range(50):
        text, pieces = f"{TEXT}\n\n  - {TEXT}", []
        while text:
            count = draw.randint(1, 9)
            pieces.append(text[:count])
            text = text[count:]
        assert wrapped("", 24, pieces) == whole


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("short\n\n  indented\n", "short\n\n  indented\n"),
        ("1234 67890", "1234 67890"),
        ("1234 678901", "1234\n678901"),
        ("日本語日本語", "日本語日本\n語"),
        ("e\u0301" * 4 + " " + "e\u0301" * 6, "e\u0301" * 4 + "\n" + "e\u0301" * 6),
        ("a 123456789012345", "a\n1234567890\n12345"),
        ("a\tb c", "a\tb\nc"),
        ("```\nlong line of code\n```\nlong line of text",
         "```\nlong line of code\n```\nlong line\nof text"),
        ("``` python x = 1", "``` python x = 1"),
    ],
)  # fmt: skip
def test_a_width_of_ten(text, shown):
    assert wrapped(text, 10) == shown


def test_a_word_appears_when_it_is_complete():
    wrap = WordWrap(10)
    said = [wrap.feed(piece) for piece in ("one", " two", " thr", "ee", "\n")]
    assert said == ["", "one", " two", "", "\nthree\n"]


class Pieces:
    """A handle and an engine that generates one piece a step."""

    finish_reason = None

    def __init__(self, *pieces, raises=None):
        self._left, self._raises, self._taken = list(pieces), raises, ""

    @property
    def completed(self):
        return self.finish_reason is not None

    def step(self):
        if self._left:
            self._taken = self._left.pop(0)
        elif self._raises:
            raise self._raises
        else:
            self.finish_reason = "stop"

    def take(self):
        taken, self._taken = self._taken, ""
        return taken

    def cancel(self, _handle):
        self.finish_reason = self.finish_reason or "cancelled"

    def completion(self):
        pass


def terminal(monkeypatch, columns):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))


def test_a_terminal_gets_whole_words_and_no_control_characters(monkeypatch, capsys):
    terminal(monkeypatch, 10)
    pieces, seen = Pieces("one ", "two\x1b[31m", " th", "ree"), []
    print_answer(pieces, pieces, seen.append)
    assert capsys.readouterr().out == "one\ntwo[31m\nthree\n"
    assert "".join(seen) == "one two\x1b[31m three"


def test_a_pipe_gets_the_text_as_it_is(capsys):
    pieces = Pieces(f"{TEXT} ", "\x1b", TEXT)
    print_answer(pieces, pieces)
    assert capsys.readouterr().out == f"{TEXT} \x1b{TEXT}\n"


def test_ctrl_c_keeps_what_was_generated(monkeypatch, capsys):
    terminal(monkeypatch, 80)
    pieces = Pieces("one ", "two", raises=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        print_answer(pieces, pieces)
    assert capsys.readouterr().out == "one two\n"
    assert pieces.finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("reason", "count", "prompt", "line"),
    [
        ("stop", 40, 10, None),
        ("cancelled", 40, 10, None),
        ("length", 40, 10, "[stopped at 40 tokens; --max-tokens]"),
        ("length", 1, 10, "[stopped at 1 token; --max-tokens]"),
        ("length", 40, 60, "[stopped at 40 tokens; the context of 100 is full]"),
    ],
)
def test_what_is_said_of_an_end(reason, count, prompt, line):
    handle = SimpleNamespace(finish_reason=reason, token_ids=[0] * count)
    assert truncation(handle, prompt, 100) == line
