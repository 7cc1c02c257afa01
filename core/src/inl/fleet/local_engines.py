"""Engines of this machine: processes that the front-end starts, and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from inl.errors import RunnerError
from inl.exit_status import describe_exit
from inl.workers.settings import SECRET, show_address

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("inl.serve")

HOST = "127.0.0.1"

SERVES = b"serves"
"""Last output of an engine that has loaded its model."""

RESTART_SECONDS = 1.0
"""Least time between two starts of an engine."""

EXIT_SECONDS = 10.0
"""Time to exit, beyond that of open requests, before an engine is killed."""


class LocalEngines:
    """Processes with one engine each, on ports of the loopback interface.

    module: run with ``python -m``. settings: of each process, as JSON-like data, which
    it reads with :func:`read_settings`. Every process has one listening socket, which
    the next one gets if it ends.
    """

    def __init__(
        self, module: str, settings: Sequence[Any], drain_seconds: float
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self._module, self._drain_seconds = module, drain_seconds
        self._sockets = [socket.create_server((HOST, 0)) for _ in settings]
        self.addresses = [
            show_address(HOST, each.getsockname()[1]) for each in self._sockets
        ]
        self._settings = settings
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * len(settings)

    async def run(self) -> None:
        """Run all processes until it is cancelled.

        Raises :class:`~inl.errors.RunnerError` if one ends before it has ever served.
        """
        tasks = [
            asyncio.create_task(self._keep(index))
            for index in range(len(self._settings))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._stop)
            for each in self._sockets:
                each.close()

    async def _keep(self, index: int) -> None:
        while True:
            began = time.monotonic()
            process = self._start(index)
            while process.poll() is None:
                await asyncio.sleep(0.1)
            how = describe_exit(process.returncode)
            name = f"engine {self.addresses[index]} (process {process.pid})"
            assert process.stdout is not None, "a pipe"
            # Libraries may have written more before.
            if not process.stdout.read().endswith(SERVES):
                raise RunnerError(
                    f"{name}: {how} before it had loaded the model; its output says why"
                )
            log.warning("%s: %s; another one starts", name, how)
            await asyncio.sleep(max(RESTART_SECONDS + began - time.monotonic(), 0))

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        listening = self._sockets[index].fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(listening)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, SECRET: self.secret.hex()},
            pass_fds=(listening,),
            # So that Ctrl-C in a terminal reaches only this process.
            process_group=0,
        )
        self.processes[index] = process
        log.info("engine %s: process %d starts", self.addresses[index], process.pid)
        assert process.stdin is not None, "a pipe"
        with contextlib.suppress(BrokenPipeError):
            # Paths and devices have names.
            line = json.dumps(self._settings[index], default=str)
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        return process

    def _stop(self) -> None:
        """Let all processes finish, and kill those that take too long."""
        running = [each for each in self.processes if each is not None]
        for process in running:
            process.terminate()
        end = time.monotonic() + self._drain_seconds + EXIT_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def read_settings() -> Any:
    """Return the settings that the parent has written to the standard input.

    It is closed when the parent ends.
    """
    return json.loads(sys.stdin.buffer.readline())


def report_served() -> None:
    """Let the parent know that this process serves, and use the output for errors."""
    os.write(1, SERVES)
    os.dup2(2, 1)


async def until_parent_ends() -> None:
    """Wait until the standard input is closed."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        if not os.read(0, 1):
            loop.remove_reader(0)
            ended.set()

    loop.add_reader(0, read)
    await ended.wait()
