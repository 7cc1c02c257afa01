"""The text of an answer, and the line that reports a truncated answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inl.cli.answer_output import print_answer, truncation

TEXT = (
    "The quick brown fox jumps over the lazy dog, and nobody could say why it did so; "
    "but it did."
)


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
    terminal(monkeypatch, 20)
    pieces, seen = Pieces("one ", "two\x1b[31m", " thirt", "een more"), []
    print_answer(pieces, pieces, seen.append)
    assert capsys.readouterr().out == "one two[31m thirteen\nmore\n"
    assert "".join(seen) == "one two\x1b[31m thirteen more"


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
