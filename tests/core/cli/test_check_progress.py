"""Progress of ``inl check``."""

from __future__ import annotations

import io

from inl.cli.check_progress import CheckProgress
from inl.testing.check import Result

RESULTS = (
    Result("backend", "backend/plugin", "passed", seconds=0.5),
    Result("kernel", "linear/plain/float32", "passed", seconds=1.0),
    Result("kernel", "linear/wide/float32", "failed", "found 1, expected 2"),
    Result("kernel", "linear/refusals/torch", "gap", "not written yet", seconds=1.25),
    Result("kernel", "embedding/plain/float32", "passed"),
)
LOG = """\
backend: backend, 1 passed, 0 failed, 0.5 s
failed  linear/wide/float32: found 1, expected 2
kernel: linear, 2 passed, 1 failed, 2.2 s
kernel: embedding, 1 passed, 0 failed, 0.0 s
"""


class Stream(io.StringIO):
    """Counts what is written and not flushed."""

    terminal = False
    unflushed = 0

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.unflushed += len(text)
        return super().write(text)

    def flush(self):
        self.unflushed = 0


class Terminal(Stream):
    terminal = True


def shown(stream):
    progress = CheckProgress(stream)
    for result in RESULTS:
        progress(result)
        assert not stream.unflushed
    progress.close()
    return stream.getvalue()


def test_a_log_has_a_line_for_each_group_and_each_failure():
    assert shown(Stream()) == LOG


def test_a_group_is_shown_before_the_run_has_ended():
    stream = Stream()
    progress = CheckProgress(stream)
    for result in RESULTS[:3]:
        progress(result)
    assert stream.getvalue() == "".join(LOG.splitlines(keepends=True)[:2])


def test_a_terminal_shows_the_current_check():
    lines = shown(Terminal()).split("\r\033[K")
    assert lines == ["", *(f"{each.section}: {each.name}" for each in RESULTS), ""]
