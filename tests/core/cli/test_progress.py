"""Progress bars."""

from __future__ import annotations

import io
import sys

import pytest

from inl.cli import main, progress
from inl.errors import RequestError
from inl.progress import LoadStage


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """Run with a terminal as standard error, and return what it shows."""

    def run(what):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", Terminal())
            patched.setattr(progress, "PATIENCE_SECONDS", -1.0)
            patched.setenv("TERM", "xterm")
            patched.setenv("COLUMNS", "80")
            what()
            return sys.stderr.getvalue()

    return run


def test_each_stage_has_a_label(shown):
    def load():
        report = progress.loading_bar()
        for stage in LoadStage:
            for done in range(3):
                report(done, 2, stage)

    rest = shown(load)
    for stage in LoadStage:
        _, label, rest = rest.partition(stage)
        assert label == stage


def test_packing_of_many_bytes_shows_at_the_first_report(shown, monkeypatch):
    def load(total, stage):
        monkeypatch.setattr(progress, "PATIENCE_SECONDS", 1e9)
        report = progress.loading_bar()
        for done in (0, total):
            report(done, total, stage)

    large = progress.LARGE_BYTES
    assert "packing weights" in shown(lambda: load(large, LoadStage.PACKING))
    assert shown(lambda: load(large - 1, LoadStage.PACKING)) == ""
    assert shown(lambda: load(large, LoadStage.LOADING)) == ""


def test_a_label_replaces_the_stage(shown):
    def count():
        report = progress.loading_bar("counting")
        for done in (1, 2, 3):
            report(done, 3)

    text = shown(count)
    assert "counting" in text
    assert "loading" not in text


def test_no_bar_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress.loading_bar() is None


def test_a_bar_is_stopped_after_an_exception(shown, monkeypatch):
    def fail(words):
        progress.loading_bar()(1, 2)
        raise RequestError(f"loading failed: {words}")

    monkeypatch.setattr(main, "_run", fail)
    text = shown(lambda: main.main([]))
    show_cursor = "\x1b[?25h"
    assert text.index("loading weights") < text.index(show_cursor)
    assert text.index(show_cursor) < text.index("loading failed")
