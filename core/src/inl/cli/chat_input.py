"""Input of ``inl chat``: a terminal with line editing, or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from inl.checkpoints.hub.resolve import cache_folder
from inl.cli.prompt_input import MAX_BYTES, decode
from inl.errors import RequestError

PROMPT = "> "
MORE = ". "
HISTORY_LINES = 1000
EXIT_HINT = "(press Ctrl-C again or Ctrl-D to exit)"


class Lines(Protocol):
    """Iterates over the user's messages."""

    interactive: bool

    def __iter__(self) -> Iterator[str]: ...


class PipedLines:
    """Each line of standard input is a message."""

    interactive = False

    def __iter__(self) -> Iterator[str]:
        where = "a line of standard input"
        for data in iter(lambda: sys.stdin.buffer.readline(MAX_BYTES + 1), b""):
            if len(data) > MAX_BYTES:
                raise RequestError(f"{where}: found more than {MAX_BYTES} bytes")
            if text := decode(data, where).strip():
                yield text


class TerminalLines:
    """Terminal prompt with line editing and a history file in the cache folder.

    A backslash at the end of a line continues the message. Ctrl-C clears the line;
    twice at an empty prompt it exits. Ctrl-D exits.
    """

    interactive = True

    def __init__(self) -> None:
        self._readline = _readline()
        self._history = cache_folder() / "chat_history"

    def __iter__(self) -> Iterator[str]:
        self._load()
        try:
            yield from self._messages()
        finally:
            self._save()

    def _messages(self) -> Iterator[str]:
        warned = False
        while True:
            try:
                text = self._message()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if self._typed():
                    continue
                if warned:
                    return
                warned = True
                print(EXIT_HINT)
                continue
            warned = False
            if text:
                yield text

    def _message(self) -> str:
        parts = [input(PROMPT)]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(input(MORE))
        return "\n".join(parts).strip()

    def _typed(self) -> bool:
        return bool(self._readline and self._readline.get_line_buffer().strip())

    def _load(self) -> None:
        if self._readline is None:
            return
        self._readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            self._readline.read_history_file(self._history)

    def _save(self) -> None:
        # The history is optional: ignore an unwritable cache folder.
        with contextlib.suppress(OSError):
            if self._readline is not None:
                _private(self._history)
                self._readline.write_history_file(self._history)


def open_lines() -> Lines:
    """Return terminal input if stdin and stdout are terminals, else piped input."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalLines()
    return PipedLines()


def _readline() -> Any:
    """Import readline, which enables line editing in ``input``, if available."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _private(path: Path) -> None:
    """Create a file readable by its owner only; the history contains user text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
