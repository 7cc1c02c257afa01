"""Child process for measurements, restarted after a crash or a hang."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from types import TracebackType
from typing import IO, Any

from inl.errors import RequestError, WorkerLost
from inl.exit_status import describe_exit, kill_group
from inl.tune.trials import TuningOptions

STARTUP_SECONDS = 600.0
"""Time limit for importing a framework and reading a model's config."""

CLOSE_SECONDS = 1.0
"""Time limit for the rest of the output of a process that has ended."""


class ChildDied(Exception):
    """The child process ended or hung; the message says how.

    The request in flight is the cause.
    """


class Child:
    """Parent side of :mod:`inl.tune.child`.

    ``facts`` and ``tasks`` are the reply to the first "open" request. limit: seconds
    after which a request counts as hanging. Raises :class:`~inl.errors.RequestError`
    if there is nothing to tune.
    """

    def __init__(self, options: TuningOptions, seed: int, *, limit: float) -> None:
        self._options, self._seed, self._limit = options, seed, limit
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str] = queue.Queue()
        reply = self._start()
        self.facts: Mapping[str, str] = reply["facts"]
        self.tasks: list[dict[str, Any]] = reply["tasks"]

    def request(
        self, do: str, task: int, config: Mapping[str, int], **fields: Any
    ) -> Any:
        """Send a request and return the reply. Raises :class:`ChildDied`.

        Starts a new process if the previous one ended.
        """
        if self._process is None:
            self._start()
        request = {"do": do, "task": task, "config": dict(config), **fields}
        reply = self._exchange(request, self._limit)
        if reply.get("broken"):
            self.close()
        return reply

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            kill_group(self._process)  # compilers that it has started hold its pipe
            self._process.wait()
            self._reader.join(CLOSE_SECONDS)
            streams = [self._process.stdin]
            if not self._reader.is_alive():  # closing waits for a reading thread
                streams.append(self._process.stdout)
            for stream in streams:
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> dict[str, Any]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inl.tune.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # and so a process group of its own
        )
        self._replies = queue.Queue()
        self._reader = threading.Thread(
            target=_read_lines, args=(self._process.stdout, self._replies), daemon=True
        )
        self._reader.start()
        request = {"do": "open", "options": asdict(self._options), "seed": self._seed}
        try:
            reply = self._exchange(request, STARTUP_SECONDS)
        except ChildDied as error:
            raise WorkerLost(
                f"tuning {self._options.device}: the measuring process {error} during "
                "startup; its output is above"
            ) from None
        if "error" in reply:
            self.close()
            kind, _, message = reply["error"].partition(": ")
            if reply["ours"]:
                raise RequestError(message)
            raise WorkerLost(f"tuning {self._options.device}: {kind}: {message}")
        return reply

    def _exchange(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        process = self._process
        assert process is not None, "started"
        assert process.stdin is not None, "started with a pipe"
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._reply(process, limit)
        except queue.Empty:
            self.close()
            raise ChildDied(f"did not reply within {limit:g} s") from None
        except OSError:
            line = ""
        if not line:
            with suppress(
                subprocess.TimeoutExpired
            ):  # it may only have closed the pipe
                process.wait(CLOSE_SECONDS)
            self.close()
            raise ChildDied(describe_exit(process.returncode))
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _reply(self, process: subprocess.Popen[str], limit: float) -> str:
        """Return a line; empty once the process has ended, ``queue.Empty`` is late."""
        end = monotonic() + limit
        while True:
            has_ended = process.poll() is not None
            try:
                return self._replies.get(timeout=min(CLOSE_SECONDS, limit))
            except queue.Empty:
                if has_ended:  # something that it has started holds its pipe
                    return ""
                if monotonic() >= end:
                    raise


def _read_lines(stream: IO[str], replies: queue.Queue[str]) -> None:
    """Put each line into ``replies``, and an empty string at the end."""
    with suppress(ValueError, OSError):
        for line in stream:
            replies.put(line)
    replies.put("")
