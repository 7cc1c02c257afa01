"""Raises an exception at one chosen event of the engine's Python code."""

from __future__ import annotations

import signal
import sys
import threading

PACKAGES = tuple(
    f"inl.{room}."
    for room in (
        "engine", "speculation", "scheduling", "kv", "protocol", "executor", "runners"
    )
)  # fmt: skip


class Strange(BaseException):
    """Not an Exception and not KeyboardInterrupt."""


class Injector:
    """Context manager that counts trace events of PACKAGES and raises at one of them.

    at: number of the event, from 1; ``None`` only counts. events: "calls" (calls and
    returns), "lines" (also every line) or "opcodes" (also every instruction). Raises
    once. threads: trace threads that start meanwhile, instead of this one. packages:
    prefixes of the names of the traced modules.
    """

    def __init__(
        self,
        at=None,
        events="calls",
        error=KeyboardInterrupt,
        threads=False,
        packages=PACKAGES,
    ):
        self.at, self.events, self.error, self.threads = at, events, error, threads
        self.packages = packages
        self.count = 0
        self.place = None
        """Where the exception was raised."""

    def __enter__(self):
        self.before = sys.gettrace()
        if self.threads:
            threading.settrace(self.trace)
        else:
            sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        if self.threads:
            threading.settrace(None)
        else:
            sys.settrace(self.before)

    def trace(self, frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(self.packages):
            return None
        if self.events == "calls":
            frame.f_trace_lines = False
        frame.f_trace_opcodes = self.events == "opcodes"
        if event != "exception":
            self.count += 1
            if self.count == self.at:
                code = frame.f_code
                self.place = f"{event} in {module}.{code.co_qualname}:{frame.f_lineno}"
                raise self.error(self.place)
        return self.trace


class Alarm:
    """Context manager that raises KeyboardInterrupt after some time, by a signal."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        self.before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
