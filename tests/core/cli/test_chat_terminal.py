"""``inl chat`` at a terminal, through a pseudo-terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

STOP, LEAVE = b"\x03", b"\x04"
SECONDS = 300


class Terminal:
    """A child process of ``inl`` on a pseudo-terminal."""

    def __init__(self, words, env):
        self.child, self.place = pty.fork()
        if self.child == 0:
            os.execve(sys.executable, [sys.executable, "-m", "inl", *words], env)
        self.unread, self.ended = b"", False

    def say(self, text):
        os.write(self.place, text)

    def until(self, text):
        """Read up to ``text`` and return the output before it."""
        end = time.monotonic() + SECONDS
        while text not in self.unread:
            assert time.monotonic() < end, f"no {text!r} in {self.unread!r}"
            if select.select([self.place], [], [], 0.1)[0]:
                self.unread += self._read()
        before, _, self.unread = self.unread.partition(text)
        return before

    def stop(self):
        """Press Ctrl-C once the program waits for a key.

        Python sees a signal that comes between the prompt and the wait for a key
        only with the next key.
        """
        still = 0
        while still < 5:
            time.sleep(0.1)
            still = still + 1 if self._sleeps() else 0
        self.say(STOP)

    def _sleeps(self):
        """Whether the process sleeps; on a busy machine it may still be running."""
        stat = Path(f"/proc/{self.child}/stat")
        return (
            not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "S"
        )

    def some(self):
        """Wait for anything unread."""
        while not self.unread:
            self.unread += self._read()

    def _read(self):
        try:
            data = os.read(self.place, 65536)
        except OSError:
            data = b""
        assert data, f"the program ended: {self.unread!r}"
        return data

    def kill(self):
        """End a program that a failed test has left behind."""
        if not self.ended:
            os.kill(self.child, signal.SIGKILL)
            self.code()

    def code(self):
        """Read to the end and return the exit code."""
        try:
            while os.read(self.place, 65536):
                pass
        except OSError:
            pass
        _, status = os.waitpid(self.child, 0)
        self.ended = True
        os.close(self.place)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def start(tiny_folder, cache):
    """Start a chat and wait for its prompt."""

    started = []

    def run(*options):
        fixed = ("--model", str(tiny_folder), "--device", "reference")
        env = {**os.environ, "TERM": "dumb", "INL_CACHE": str(cache)}
        env.pop("INL_PLUGINS", None)
        terminal = Terminal(["chat", *fixed, *options], env)
        started.append(terminal)
        assert b"tiny-chat on reference:0; /help" in terminal.until(b"> ")
        return terminal

    yield run
    for terminal in started:
        terminal.kill()


def test_ctrl_c_stops_the_answer_and_continues_the_chat(start):
    chat = start("--max-tokens", "6000")
    chat.say(b"Hello\n")
    chat.until(b"Hello\r\n")
    chat.some()
    chat.say(STOP)
    chat.until(b"(stopped)")
    chat.until(b"> ")
    chat.say(b"/stats\n")
    assert b"1 turn, 0 of them" in chat.until(b"> ")
    chat.say(b"Again\n")
    chat.until(b"Again\r\n")
    chat.some()
    chat.say(STOP)
    chat.until(b"(stopped)")
    chat.until(b"> ")
    chat.say(LEAVE)
    assert chat.code() == 0


@pytest.mark.full
def test_ctrl_c_twice_at_an_empty_prompt_exits(start):
    chat = start()
    chat.stop()
    chat.until(b"(press Ctrl-C again or Ctrl-D to exit)")
    chat.until(b"> ")
    chat.stop()
    assert chat.code() == 0


def test_ctrl_c_clears_a_partial_line(start):
    chat = start()
    for _ in range(3):
        chat.say(b"half a thought")
        chat.until(b"half a thought")
        chat.stop()
        assert b"to exit" not in chat.until(b"> ")
    chat.say(b"/exit\n")
    assert chat.code() == 0


def test_an_error_prints_one_line_and_continues_the_chat(start):
    chat = start("--max-tokens", "3")
    chat.say(b"/nope\n")
    assert b"/nope: unknown command" in chat.until(b"> ")
    chat.say(b"/retry\n")
    assert b"there is no message" in chat.until(b"> ")
    chat.say(b"one \\\n")
    chat.until(b". ")
    chat.say(b"two\n")
    chat.until(b"> ")
    chat.say(b"/stats\n")
    assert b"1 turn" in chat.until(b"> ")
    chat.say(LEAVE)
    assert chat.code() == 0


@pytest.mark.full
def test_the_history_file_is_private(start, cache):
    pytest.importorskip("readline")
    chat = start()
    chat.say(b"/system something to find again\n")
    chat.until(b"> ")
    chat.say(LEAVE)
    assert chat.code() == 0
    history = cache / "chat_history"
    assert "something to find again" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    chat = start()
    chat.say(b"\x10")  # Ctrl-P: the line before
    chat.until(b"something to find again")
    chat.say(b"\n")
    chat.until(b"> ")
    chat.say(LEAVE)
    assert chat.code() == 0


def test_an_answer_sends_no_control_characters(start):
    """The tiny model samples random bytes, including the escape character."""
    chat = start("--max-tokens", "500", "--temperature", "3")
    chat.say(b"Hello\n")
    chat.until(b"Hello\r\n")
    shown = chat.until(b"\r\n> ").decode()
    assert len(shown) > 200
    odd = {each for each in shown if ord(each) < 32 or 127 <= ord(each) < 160}
    assert odd <= set("\r\n\t")
    chat.say(LEAVE)
    assert chat.code() == 0
