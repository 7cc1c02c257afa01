"""A child process that is asked, watched, and replaced when it dies."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any

from inl.errors import RequestError, WorkerLost
from inl.tune.trials import Wanted

OPENING_SECONDS = 600.0
"""To import a framework and read a model."""


class Died(Exception):
    """The child is gone; says how. The request that it was at is to blame."""


class Child:
    """Asks :mod:`inl.tune.child` what a way takes, and whether it is right.

    ``facts`` and ``tasks`` are what the first one opened said. Raises
    :class:`~inl.errors.RequestError` where there is nothing to tune.
    """

    def __init__(self, wanted: Wanted, seed: int, *, limit: float) -> None:
        self._wanted, self._seed, self._limit = wanted, seed, limit
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        opened = self._open()
        self.facts: Mapping[str, str] = opened["facts"]
        self.tasks: list[dict[str, Any]] = opened["tasks"]

    def ask(self, do: str, task: int, config: Mapping[str, int], **more: Any) -> Any:
        """Get an answer, within the limit. Raises :class:`Died`."""
        if self._process is None:
            self._open()
        request = {"do": do, "task": task, "config": dict(config), **more}
        answer = self._send(request, self._limit)
        if answer.get("broken"):
            self.close()
        return answer

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
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

    def _open(self) -> dict[str, Any]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inl.tune.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers = queue.Queue()
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        )
        reader.start()
        request = {"do": "open", "wanted": asdict(self._wanted), "seed": self._seed}
        try:
            answer = self._send(request, OPENING_SECONDS)
        except Died as error:
            raise WorkerLost(
                f"tuning {self._wanted.device}: the process that tries kernels {error} "
                "before it tried any; its own words are above"
            ) from None
        if "error" in answer:
            self.close()
            kind, _, said = answer["error"].partition(": ")
            if answer["ours"]:
                raise RequestError(said)
            raise WorkerLost(f"tuning {self._wanted.device}: {kind}: {said}")
        return answer

    def _send(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        process = self._process
        assert process is not None, "opened"
        assert process.stdin is not None, "opened with a pipe"
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            self.close()
            raise Died(f"gave no answer in {limit:g} s") from None
        except OSError:
            line = ""
        if not line:
            code = process.wait()
            self.close()
            raise Died(_ending(code))
        found: dict[str, Any] = json.loads(line)
        return found


def _read(stream: IO[str], answers: queue.Queue[str]) -> None:
    """Hand lines on, and an empty one at the end."""
    with suppress(ValueError, OSError):
        for line in stream:
            answers.put(line)
    answers.put("")


def _ending(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
