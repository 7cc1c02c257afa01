"""Chat templates: messages to a prompt, by a stranger's program held apart."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, final

from inl.errors import MissingPackage, RequestError, TemplateError

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from inl.text.sandbox import main; main()"
)
"""An isolated interpreter finds modules where this one does, and nowhere else."""

ENDED = (
    "its process ended: one operation ran for seconds or took more memory than there "
    f"is; accepted: less (or {sys.executable} cannot import inl and jinja2)"
)

START_SECONDS = 20.0
"""A process that is not ready after so long is given up: disks may be cold."""

SECONDS = 4.0
"""One that has not answered after so long is ended; it should have ended itself."""


@final
class ChatTemplate:
    """A jinja2 template, as model files carry them, run in a process of its own.

    The process starts with the first use and serves all later ones. ``where`` names
    the template in messages. Safe to share between threads.
    """

    def __init__(
        self,
        source: str,
        *,
        where: str = "chat template",
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        self.source = source
        self.where = where
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Write messages, objects with ``role`` and ``content``, as a prompt.

        The result holds its special tokens: encode it with ``add_special=False``.
        Further ``variables`` (``tools``, ``bos_token``) reach the template.

        Raises :class:`TemplateError` where the template is malformed, refuses the
        messages, or does what a template may not; :class:`RequestError` for messages
        that are no JSON.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **self._tokens}
        given |= variables
        given |= {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"messages: {error}; accepted: what JSON can hold"
            ) from error
        with self._lock:
            return self._ask(request)

    def close(self) -> None:
        """End the process; a later :meth:`apply` starts another."""
        with self._lock:
            self._stop()

    def _ask(self, request: str) -> str:
        if self._process is None:
            try:
                self._process = _Process()
            except OSError as error:
                raise TemplateError(
                    f"{self.where}: {sys.executable} cannot start: {error.strerror}"
                ) from error
            self._checked(self._process.ask(json.dumps(self.source), START_SECONDS))
        return self._checked(self._process.ask(request, SECONDS))

    def _checked(self, reply: Mapping[str, Any] | None) -> str:
        if reply is not None and "text" in reply:
            return str(reply["text"])
        self._stop()
        reply = reply or {"error": ENDED}
        line = reply.get("line")
        place = f"{self.where}, line {line}" if line else self.where
        raise TemplateError(f"{place}: {reply['error']}")

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


class _Process:
    """The sandbox's process and its two pipes."""

    def __init__(self) -> None:
        if find_spec("jinja2") is None:
            raise MissingPackage(
                "jinja2 is not installed, which chat templates are written for. "
                "Try: pip install 'inl-core[text]'"
            )
        self._running = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )
        self.stop = weakref.finalize(self, _end, self._running)

        places = [place for place in sys.path if isinstance(place, str)]
        self._say(json.dumps([*places, str(Path(__file__).parents[2])]))

    def _say(self, line: str) -> None:
        _pipe(self._running.stdin).write(line + "\n")
        _pipe(self._running.stdin).flush()

    def ask(self, request: str, seconds: float) -> Mapping[str, Any] | None:
        """Send a line and wait for a line; ``None`` if the process ended instead."""
        timer = threading.Timer(seconds, self._running.kill)
        timer.daemon = True
        timer.start()
        try:
            self._say(request)
            reply = _pipe(self._running.stdout).readline()
        except BrokenPipeError:
            return None
        finally:
            timer.cancel()
        return json.loads(reply) if reply.endswith("\n") else None


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # all were asked for
    return pipe


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            _pipe(pipe).close()
    process.wait()
