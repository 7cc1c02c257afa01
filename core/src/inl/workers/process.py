"""Starts, monitors and stops the process of a worker, from its parent."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from inl.errors import RunnerError, WorkerLost
from inl.exit_status import describe_exit, read_output, signal_name
from inl.forks import disconnect
from inl.protocol.wire import Channel
from inl.workers.connection import new_connection
from inl.workers.process_state import is_stopped

if TYPE_CHECKING:
    from inl.workers.place import Request

log = logging.getLogger("inl.worker")

MAIN = "inl.runners.worker_main"

OUTPUT_BYTES = 1 << 14
"""Bytes of a worker's last output that are stored for the message of its loss."""

OUTPUT_LINES = 12
"""Lines of it in the message."""

EXIT_SECONDS = 5.0
"""Time to exit on request, before the process is terminated and then killed."""


class WorkerProcess:
    """An interpreter that runs :mod:`inl.runners.worker_main`, and the channel to it.

    Its output is logged as ``inl.worker``. Raises :class:`~inl.errors.RunnerError` if
    it cannot be started.
    """

    def __init__(self, python: str, arguments: Sequence[str] = ()) -> None:
        self.python = python
        self._connection = new_connection()
        command = [python, "-m", MAIN, *self._connection.arguments]
        try:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                **self._connection.options,
            )
            self.channel = Channel(self._connected())
        except (OSError, ValueError) as error:
            raise RunnerError(f"worker {python}: cannot be started: {error}") from error
        finally:
            self._connection.close()
        self._output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _connected(self) -> socket.socket:
        """The connected socket; a child that does not connect is killed."""
        try:
            return self._connection.connected(self._process)
        except BaseException as error:
            output, _, _ = read_output(self._process, 0.0)
            if isinstance(error, OSError) and output:
                last = output.decode(errors="replace").splitlines()[-OUTPUT_LINES:]
                raise OSError("\n    ".join([f"{error}. Its output:", *last])) from None
            raise

    @property
    def name(self) -> str:
        """The interpreter."""
        return self.python

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, which no step does."""
        return is_stopped(self.pid)

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None, "the output is piped"
        while data := os.read(stream.fileno(), 1 << 16):
            self._output = (self._output + data)[-OUTPUT_BYTES:]
            for line in data.decode(errors="replace").splitlines():
                log.info("worker %d: %s", self.pid, line)

    def lost(self, doing: str, advice: str = "", how: str = "") -> WorkerLost:
        """End the process if it still runs; returns an error with its last output.

        doing: the task of the worker. advice: what the user can do. how: the reason,
        if this process stops it.
        """
        if how:
            self.stop(0.0)
        how = how or self._end(1.0)
        self._reader.join(1.0)
        lines = self._output.decode(errors="replace").splitlines()[-OUTPUT_LINES:]
        output = "".join(f"\n    {line}" for line in lines) or " nothing"
        return WorkerLost(
            f"worker {self.python} (process {self.pid}): {how} while {doing}"
            f"{advice and f'; {advice}'}. Its last output:{output}"
        )

    def _end(self, seconds: float) -> str:
        try:
            return _how(self._process.wait(seconds))
        except subprocess.TimeoutExpired:
            self.stop(0.0)
            return "closed its connection, and was stopped,"

    def disconnect(self) -> None:
        """Leave the process and its pipes to the parent, in a forked child."""
        self.channel.disconnect()
        self._connection.disconnect()
        if self._process.stdout is not None:
            disconnect(self._process.stdout.fileno())

    def stop(self, seconds: float = EXIT_SECONDS) -> None:
        """Wait for the exit; then terminate, then kill. Stopping twice is allowed."""
        for timeout, act in (
            (seconds, self._process.terminate),
            (seconds and 2.0, self._process.kill),
        ):
            try:
                self._process.wait(timeout)
                break
            except subprocess.TimeoutExpired:
                act()
        self._process.wait()
        self.channel.close()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        # A grandchild may still have the pipe open; its output is not read.
        self._reader.join(1.0)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()


def start_child(request: Request) -> WorkerProcess:
    """Start a worker as a child process: the place ``worker:PYTHON/DEVICE``.

    It is connected by an inherited socket or a pipe, and opens no port.
    """
    return WorkerProcess(request.target, request.options)


def _how(status: int) -> str:
    hint = ", possibly out of memory," if signal_name(-status) == "SIGKILL" else ""
    return f"{describe_exit(status)}{hint}"
