"""The bar of what takes a while."""

from __future__ import annotations

import io
import sys

import pytest

from inl.cli import progress


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


def test_programs_after_weights_are_named(shown):
    def load():
        tell = progress.loading_bar()
        for total in (3, 2):
            for done in range(1, total + 1):
                tell(done, total)

    text = shown(load)
    assert "loading weights" in text
    assert "making programs" in text.split("loading weights")[-1]


def test_one_thing_has_one_name(shown):
    def count():
        tell = progress.loading_bar("counting")
        for done in (1, 2, 3):
            tell(done, 3)

    text = shown(count)
    assert "counting" in text
    assert "making" not in text


def test_nobody_looks_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress.loading_bar() is None
