"""Chat templates: renders messages to a prompt in a sandboxed process."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, final

from inl.errors import MissingPackage, RequestError, TemplateError
from inl.forks import disconnect, on_fork

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from inl.text.sandbox import main; main()"
)
"""Runs in an isolated interpreter, which gets this process's module search path."""

ENDED = (
    "its process ended: one operation exceeded the limit of time or memory; "
    f"accepted: less of both (or {sys.executable} cannot import inl and jinja2)"
)

START_SECONDS = 120.0
"""Time limit for the start of the process; a cold disk takes seconds."""

CHUNK = 1 << 16
"""Bytes to read at once."""

SECONDS = 120.0
"""Time limit of a rendering, for a process that does not end by itself: it limits its
own processor time to seconds, which may take long on a busy machine."""


@final
class ChatTemplate:
    """A jinja2 chat template of a model, rendered in a separate process.

    The process starts at the first use and serves all later ones; a forked child of
    this process starts its own. where: prefix of error messages. special_tokens:
    variables of the template, such as ``pad_token``. tool_use: renders conversations
    with tools, if the model has another template for them. Thread-safe.
    """

    def __init__(
        self,
        source: str,
        *,
        where: str = "chat template",
        special_tokens: Mapping[str, str] | None = None,
        tool_use: ChatTemplate | None = None,
    ) -> None:
        self.source = source
        self.tool_use = tool_use
        self.where = where
        self._tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        self._lock = threading.Lock()
        self._process: _Process | None = None
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Leave the process, and the lock, to the parent's threads."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.disconnect()
            self._process = None

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render messages, mappings with ``role`` and ``content``, to a prompt.

        The result contains the special tokens: encode it with ``add_special=False``.
        ``variables`` (``tools``, ``bos_token``) are passed to the template.

        Raises :class:`TemplateError` if the template is malformed, rejects the
        messages or violates the sandbox, and :class:`RequestError` for messages that
        JSON cannot represent.
        """
        if self.tool_use is not None and variables.get("tools") is not None:
            return self.tool_use.apply(
                messages, add_generation_prompt=add_generation_prompt, **variables
            )
        context: dict[str, Any] = {"tools": None, "documents": None, **self._tokens}
        context |= variables
        context |= {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps(context)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"messages: {error}; accepted: values that JSON can represent"
            ) from error
        with self._lock:
            return self._render(request)

    def start(self, *, with_tools: bool = False) -> None:
        """Start the process, if it is not running, and do not wait for it.

        with_tools: the one of ``tool_use``, if there is one. Raises
        :class:`TemplateError` where no process can start.
        """
        if with_tools and self.tool_use is not None:
            self.tool_use.start()
            return
        with self._lock:
            if self._process is None:
                self._process = self._open()

    def close(self) -> None:
        """Stop the process; a later :meth:`apply` starts another."""
        if self.tool_use is not None:
            self.tool_use.close()
        with self._lock:
            if self._process is not None:
                self._process.stop()
                self._process = None

    def _render(self, request: str) -> str:
        # After an interrupted request, its reply must not be taken for the next one's:
        # the process is kept only once its reply has arrived.
        process, self._process = self._process, None
        if process is None:
            process = self._open()
        if process.is_starting:
            self._text_of(process.receive(START_SECONDS))
            process.is_starting = False
        process.send(request)
        reply = process.receive(SECONDS)
        if reply is not None:
            self._process = process
        return self._text_of(reply)

    def _open(self) -> _Process:
        """Return a new process that compiles the template, whose reply is to come."""
        try:
            process = _Process()
        except OSError as error:
            raise TemplateError(
                f"{self.where}: {sys.executable} cannot start: {error.strerror}"
            ) from error
        process.send(json.dumps(self.source))
        return process

    def _text_of(self, reply: Mapping[str, Any] | None) -> str:
        """Return the text of a reply; raises for an error."""
        if reply is not None and "text" in reply:
            return str(reply["text"])
        reply = reply or {"error": ENDED}
        line = reply.get("line")
        where = f"{self.where}, line {line}" if line else self.where
        raise TemplateError(f"{where}: {reply['error']}")


class _Process:
    """The sandbox process, with a pipe to its stdin and one from its stdout."""

    def __init__(self) -> None:
        if find_spec("jinja2") is None:
            raise MissingPackage(
                "jinja2, which chat templates need, is not installed. "
                "Try: pip install 'inl-core[text]'"
            )
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # nothing is buffered that a forked child could send twice
            start_new_session=True,  # not interrupted by Ctrl-C in the terminal
        )
        self.stop = weakref.finalize(self, _kill, self._child)
        self.is_starting = True
        """Whether the reply to the template's source has not been received."""

        folders = [folder for folder in sys.path if isinstance(folder, str)]
        self.send(json.dumps([*folders, str(Path(__file__).parents[2])]))

    def disconnect(self) -> None:
        """Leave the process and its pipes to the parent, in a forked child."""
        self.stop.detach()
        for pipe in (self._child.stdin, self._child.stdout):
            disconnect(_pipe(pipe).fileno())

    def send(self, line: str) -> None:
        """Send a line. If the process has ended, :meth:`receive` returns ``None``."""
        rest = memoryview(line.encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[_pipe(self._child.stdin).write(rest) :]

    def receive(self, seconds: float) -> Mapping[str, Any] | None:
        """Return a reply; ``None`` if the process has ended.

        The process is killed after ``seconds``.
        """
        deadline = time.monotonic() + seconds
        parts, output = [b""], _pipe(self._child.stdout)
        with _killed_at(deadline, self._child) as wait:
            while not parts[-1].endswith(b"\n"):
                wait()
                parts.append(output.read(CHUNK))
                if not parts[-1]:
                    break
        reply = b"".join(parts)
        return json.loads(reply) if reply.endswith(b"\n") else None


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # Popen was called with PIPE
    return pipe


@contextlib.contextmanager
def _killed_at(
    deadline: float, child: subprocess.Popen[bytes]
) -> Iterator[Callable[[], None]]:
    """Kill a process at ``deadline``; yields a call to make before its output is read.

    Windows cannot wait for a pipe: there a thread kills the process.
    """
    if sys.platform == "win32":
        timer = threading.Timer(max(deadline - time.monotonic(), 0), child.kill)
        timer.daemon = True
        timer.start()
        try:
            yield lambda: None
        finally:
            timer.cancel()
        return

    def wait() -> None:
        # Not limited to 1024 open files.
        with selectors.DefaultSelector() as selector:
            selector.register(_pipe(child.stdout), selectors.EVENT_READ)
            if not selector.select(max(deadline - time.monotonic(), 0)):
                child.kill()

    yield wait


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            _pipe(pipe).close()
    process.wait()
