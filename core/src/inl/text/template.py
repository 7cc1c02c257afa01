"""Chat templates: renders messages to a prompt in a sandboxed process."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, final

from inl.bounded_child import START_SECONDS, BoundedChild
from inl.errors import MissingPackage, RequestError, TemplateError
from inl.forks import on_fork
from inl.install_command import install_command
from inl.text.template_shapes import TemplateShapes

PROGRAM = "from inl.text.sandbox import main; main()"

ENDED = (
    "its process ended: one operation exceeded the limit of time or memory; "
    f"accepted: less of both (or {sys.executable} cannot import inl and jinja2)"
)


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
        self.shapes = TemplateShapes(self.apply)
        """The forms of messages that it takes."""
        self._tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        self._lock = threading.Lock()
        self._process: BoundedChild | None = None
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
        process.send(request.encode() + b"\n")
        reply = process.receive()
        if reply is not None:
            self._process = process
        return self._text_of(reply)

    def _open(self) -> BoundedChild:
        """Return a new process that compiles the template, whose reply is to come."""
        if find_spec("jinja2") is None:
            raise MissingPackage(
                "jinja2, which chat templates need, is not installed. "
                f"Try: {install_command('inl-core[text]')}"
            )
        try:
            process = BoundedChild(PROGRAM)
        except OSError as error:
            raise TemplateError(
                f"{self.where}: {sys.executable} cannot start: {error.strerror}"
            ) from error
        process.send(json.dumps(self.source).encode() + b"\n")
        return process

    def _text_of(self, reply: Mapping[str, Any] | None) -> str:
        """Return the text of a reply; raises for an error."""
        if reply is not None and "text" in reply:
            return str(reply["text"])
        reply = reply or {"error": ENDED}
        line = reply.get("line")
        where = f"{self.where}, line {line}" if line else self.where
        raise TemplateError(f"{where}: {reply['error']}")
