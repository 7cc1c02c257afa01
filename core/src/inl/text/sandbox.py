"""The process that chat templates run in.

A template is a stranger's program. Here it can be stopped from outside whatever it
does, and its memory has a limit; :mod:`inl.text.template_rules` keeps it from reaching
attributes. One JSON value a line: the source first, then the variables of each
rendering; answered by ``{"text"}`` or by ``{"error", "line"}``.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from inl.text.template_rules import (
    MAX_TEXT,
    RefusedError,
    compile_template,
    make_environment,
)

MAX_MEMORY = 768 << 20
"""Bytes of address space, where the system can limit them."""

SOFT_SECONDS = 1.5
"""After this a template is interrupted, and the line that it was at is known."""

HARD_SECONDS = 2.5
"""After this the process ends: it was inside one endless operation."""


def render(template: Any, variables: dict[str, Any]) -> str:
    """Run the template, and stop it when its text gets too long."""
    parts, size = [], 0
    for part in template.generate(variables):
        size += len(part)
        if size > MAX_TEXT:
            raise RefusedError(f"found over {MAX_TEXT} characters; accepted: fewer")
        parts.append(part)
    return "".join(parts)


def line_of(error: BaseException, template: Any) -> int | None:
    """Find the template's line that an error is about; ``None`` where nobody knows."""
    found: int | None = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = trace.tb_lineno
        trace = trace.tb_next
    if found and template and not isinstance(error, Exception):
        # jinja2 translates lines to those of the template, but not in an interrupt.
        found = template.get_corresponding_lineno(found)
    return found


def describe(error: BaseException, template: Any = None) -> dict[str, Any]:
    """Write an error as an answer."""
    if isinstance(error, KeyboardInterrupt):
        text = f"ran longer than {SOFT_SECONDS} seconds; accepted: less"
    elif isinstance(error, MemoryError):
        text = f"needed over {MAX_MEMORY >> 20} MiB of memory; accepted: less"
    elif isinstance(error, RecursionError):
        text = "found calls or nesting too deep; accepted: some hundred levels"
    elif isinstance(error, RefusedError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"[:300] + "; accepted: valid jinja2"
    return {"error": text, "line": line_of(error, template)}


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """Interrupt what takes long, and end the process if that does not help."""
    timer = threading.Timer(SOFT_SECONDS, _thread.interrupt_main)
    timer.daemon = True
    faulthandler.dump_traceback_later(HARD_SECONDS, exit=True, file=sys.stderr)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def limit_memory() -> None:
    """Limit the address space where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, most))


class Session:
    """One template, compiled once and rendered many times."""

    def __init__(self) -> None:
        self.environment = make_environment()
        self.template: Any = None
        limit_memory()

    def compile(self, source: str) -> dict[str, Any]:
        self.template = compile_template(self.environment, source)
        return {"text": ""}

    def render(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"text": render(self.template, variables)}

    def answer(self, work: Callable[[Any], dict[str, Any]], given: Any) -> str:
        """Do one piece of work, and turn whatever happens into an answer."""
        try:
            with deadline():
                reply = work(given)
        except BaseException as error:
            reply = describe(error, self.template)
        return json.dumps(reply) + "\n"


def main() -> None:
    """Serve one template until standard input ends."""
    # A parent that ignores SIGINT (nohup, a background job) passes that on, and
    # interrupt_main does nothing to a process that ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    session = Session()
    work: Callable[[Any], dict[str, Any]] = session.compile
    while line := sys.stdin.readline():
        sys.stdout.write(session.answer(work, json.loads(line)))
        sys.stdout.flush()
        work = session.render
