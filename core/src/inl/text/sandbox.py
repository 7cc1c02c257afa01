"""Sandbox process for chat templates, which are untrusted programs.

The process has limits of time and memory and can be killed from outside;
:mod:`inl.text.template_rules` restricts attribute access. Protocol: one JSON value per
line, first the template source, then the variables of each rendering. A reply is
``{"text"}`` or ``{"error", "line"}``.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from inl.bounded_child import limit_address_space
from inl.text.template_rules import (
    MAX_TEXT,
    RefusedError,
    compile_template,
    make_environment,
)

MAX_MEMORY = 768 << 20
"""Limit of the address space in bytes, on systems with ``setrlimit``."""

SOFT_SECONDS = 1.5
"""Processor time after which a template is interrupted; the error names its line."""

HARD_SECONDS = 2
"""Processor time after which the process is killed: one operation did not return."""


class TimeLimit(BaseException):
    """Raised in a template that has used SOFT_SECONDS."""


def render(template: Any, variables: dict[str, Any]) -> str:
    """Render the template; raises RefusedError if its output gets too long."""
    parts, size = [], 0
    for part in template.generate(variables):
        size += len(part)
        if size > MAX_TEXT:
            raise RefusedError(f"found over {MAX_TEXT} characters; accepted: fewer")
        parts.append(part)
    return "".join(parts)


def line_of(error: BaseException, template: Any) -> int | None:
    """Return the template line that raised an error, or ``None`` if unknown."""
    line: int | None = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    if line and template and not isinstance(error, Exception):
        # jinja2 maps lines to those of the template, except in an interrupt.
        line = template.get_corresponding_lineno(line)
    return line


def describe(error: BaseException, template: Any = None) -> dict[str, Any]:
    """Convert an error to a reply."""
    if isinstance(error, TimeLimit | KeyboardInterrupt):
        text = f"ran longer than {SOFT_SECONDS} seconds of processor time"
        text += "; accepted: less"
    elif isinstance(error, MemoryError):
        text = f"needed over {MAX_MEMORY >> 20} MiB of memory; accepted: less"
    elif isinstance(error, RecursionError):
        text = "found calls or nesting too deep; accepted: a few hundred levels"
    elif isinstance(error, RefusedError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"[:300] + "; accepted: valid jinja2"
    return {"error": text, "line": line_of(error, template)}


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """Interrupt the block after SOFT_SECONDS, kill the process after HARD_SECONDS.

    Both are processor time, which other processes do not use up. A signal of its own
    interrupts, as the process may ignore SIGINT; Windows counts time on the clock.
    """
    if sys.platform == "win32":
        with _deadline_on_clock():
            yield
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    last = math.ceil(used.ru_utime + used.ru_stime) + HARD_SECONDS
    signal.signal(signal.SIGPROF, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGXCPU])
    resource.setrlimit(resource.RLIMIT_CPU, (last, most))
    signal.setitimer(signal.ITIMER_PROF, SOFT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _interrupt(_number: int, _frame: object) -> None:
    raise TimeLimit


@contextlib.contextmanager
def _deadline_on_clock() -> Iterator[None]:
    timer = threading.Timer(SOFT_SECONDS, _thread.interrupt_main)
    timer.daemon = True
    faulthandler.dump_traceback_later(HARD_SECONDS, exit=True, file=sys.stderr)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


class Session:
    """A template, compiled once and rendered many times."""

    def __init__(self) -> None:
        self.environment = make_environment()
        self.template: Any = None

    def compile(self, source: str) -> dict[str, Any]:
        self.template = compile_template(self.environment, source)
        return {"text": ""}

    def render(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"text": render(self.template, variables)}

    def answer(self, work: Callable[[Any], dict[str, Any]], request: Any) -> str:
        """Call ``work`` within the deadline; returns its result or error as JSON."""
        try:
            with deadline():
                reply = work(request)
        except BaseException as error:
            reply = describe(error, self.template)
        return json.dumps(reply) + "\n"


def main() -> None:
    """Serve one template until standard input ends."""
    # A parent that ignores signals (nohup, a background job) passes that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform != "win32":
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    session = Session()
    limit_address_space(MAX_MEMORY)
    work: Callable[[Any], dict[str, Any]] = session.compile
    while line := sys.stdin.readline():
        sys.stdout.write(session.answer(work, json.loads(line)))
        sys.stdout.flush()
        work = session.render
