"""Child processes that parse untrusted input, whose crash does not end the parent.

A child reads lines from its standard input and writes one JSON value per line to its
standard output. It limits its own address space and processor time, with
:func:`limit_address_space` and :func:`killed_after`; the parent limits how long it
waits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import IO, Any, Final, final

from inl.exit_status import describe_exit
from inl.forks import disconnect
from inl.readiness import READABLE, WRITABLE, waiter

PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
)
"""Runs in an isolated interpreter, which gets this process's module search path."""

CHUNK: Final = 1 << 16
"""Bytes to read at once."""

START_SECONDS: Final = 120.0
"""Time limit for the start of a process; a cold disk takes seconds."""

SECONDS: Final = 120.0
"""Time limit of a request, for a process that does not end by itself: it limits its own
processor time to seconds, which may take long on a busy machine."""


@final
class BoundedChild:
    """A child process that runs ``program``, with a pipe to its stdin and its stdout.

    It runs in an isolated interpreter and a session of its own, which Ctrl-C in the
    terminal does not interrupt. It ends when it is no longer referenced. Not
    thread-safe. Raises ``OSError`` if it cannot start.
    """

    def __init__(self, program: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # nothing is buffered that a forked child could send twice
            start_new_session=True,
        )
        self.stop = weakref.finalize(self, _kill, self._child)
        """Ends the process and closes the pipes; may be called again."""
        self.is_starting = True
        """For the owner: whether the reply to the first message is to come."""
        if sys.platform != "win32":
            os.set_blocking(_pipe(self._child.stdin).fileno(), False)
        folders = [folder for folder in sys.path if isinstance(folder, str)]
        paths = json.dumps([*folders, str(Path(__file__).parents[1])])
        self.send(paths.encode() + b"\n")

    def disconnect(self) -> None:
        """Leave the process and its pipes to the parent, in a forked child."""
        self.stop.detach()
        for pipe in (self._child.stdin, self._child.stdout):
            disconnect(_pipe(pipe).fileno())

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def send(self, data: bytes, seconds: float = SECONDS) -> None:
        """Send bytes. If the process has ended, :meth:`receive` returns ``None``.

        The process is killed after ``seconds``.
        """
        rest, target = memoryview(data), _pipe(self._child.stdin)
        with (
            self._killed_after(target, WRITABLE, seconds) as wait,
            contextlib.suppress(BrokenPipeError),
        ):
            while rest := rest[target.write(rest) or 0 :]:
                if not wait():
                    return

    def end_input(self) -> None:
        """Close the standard input of the process."""
        with contextlib.suppress(OSError):
            _pipe(self._child.stdin).close()

    def receive(self, seconds: float = SECONDS) -> Any:
        """Return a reply; ``None`` if the process has ended.

        The process is killed after ``seconds``.
        """
        parts, source = [b""], _pipe(self._child.stdout)
        with self._killed_after(source, READABLE, seconds) as wait:
            while not parts[-1].endswith(b"\n"):
                wait()
                parts.append(source.read(CHUNK))
                if not parts[-1]:
                    break
        reply = b"".join(parts)
        return json.loads(reply) if reply.endswith(b"\n") else None

    def receive_bytes(self, count: int, seconds: float = SECONDS) -> bytearray | None:
        """Return ``count`` bytes; ``None`` if the process has ended before.

        The process is killed after ``seconds``.
        """
        data, source = bytearray(count), _pipe(self._child.stdout)
        rest: Any = memoryview(data)
        with self._killed_after(source, READABLE, seconds) as wait:
            while rest:
                wait()
                size = source.readinto(rest)  # type: ignore[attr-defined]
                if not size:
                    return None
                rest = rest[size:]
        return data

    def exit_status(self) -> int:
        """End the process, if it has not ended, and return its exit status."""
        self.stop()
        return self._child.returncode

    @contextlib.contextmanager
    def _killed_after(
        self, pipe: IO[bytes], event: int, seconds: float
    ) -> Iterator[Callable[[], bool]]:
        """Kill the process after ``seconds``.

        Yields a call to make before each use of a pipe, which returns whether the
        process was left alive. Windows cannot wait for a pipe: there a thread kills it.
        """
        if sys.platform == "win32":
            timer = threading.Timer(max(seconds, 0), self._child.kill)
            timer.daemon = True
            timer.start()
            try:
                yield lambda: True
            finally:
                timer.cancel()
            return
        deadline = time.monotonic() + seconds
        # Neither limited to 1024 open files nor another one, as `select` and `epoll`.
        waiting = waiter()
        waiting.register(pipe, event)

        def wait() -> bool:
            left = max(deadline - time.monotonic(), 0)
            if waiting.poll(ceil(left * 1e3)):
                return True
            self._child.kill()
            return False

        yield wait


def describe_end(status: int, limits: str) -> str:
    """Return why a process ended that limits itself; ``limits`` names the limits."""
    reasons = {
        -getattr(signal, name): reason
        for name, reason in ENDINGS.items()
        if hasattr(signal, name)
    }
    return f"{reasons.get(status) or f'its process {describe_exit(status)}'}; {limits}"


ENDINGS: Final = {
    "SIGPROF": "took too much processor time",
    "SIGXCPU": "took too much processor time",
    "SIGKILL": "was killed: it took too long, or the system is out of memory",
    "SIGABRT": "the library aborted, as it does without memory",
    "SIGSEGV": "the library crashed, as it does without room on the stack",
    "SIGBUS": "the library crashed, as it does without room on the stack",
}
"""Reasons by the signal that ended a process."""


def used_address_space() -> int:
    """Return the address space of this process in bytes; 0 where it is unknown."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit_address_space(size: int) -> None:
    """Limit the address space to ``size`` bytes if the system supports it."""
    try:
        import resource
    except ImportError:  # Windows
        return
    with contextlib.suppress(ValueError, OSError):  # macOS counts shared libraries
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, most))


@contextlib.contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Kill this process once the block has used ``seconds`` of processor time.

    Processor time, which other processes do not use up; Windows counts time on the
    clock.
    """
    if sys.platform == "win32":
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def allow_kill_by_time() -> None:
    """Let the signal of :func:`killed_after` end this process.

    Called on the main thread: a parent that ignores or blocks signals passes that on.
    """
    if sys.platform != "win32":
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # Popen was called with PIPE
    return pipe


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            _pipe(pipe).close()
    process.wait()
