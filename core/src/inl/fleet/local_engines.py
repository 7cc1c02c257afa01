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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError, RunnerError
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

MOST_RESTART_SECONDS = 30.0
"""Such a time of one whose next processes have not loaded their model."""

EXIT_SECONDS = 10.0
"""Time to exit, beyond that of open requests, before an engine is killed."""


@dataclass(eq=False)
class LocalEngine:
    """One of the processes, and the socket that it listens on."""

    address: str
    listening: socket.socket
    settings: Any
    process: subprocess.Popen[bytes] | None = None
    task: asyncio.Task[None] | None = None


class LocalEngines:
    """Processes with one engine each, on ports of the loopback interface.

    module: run with ``python -m``. settings: of each process, as JSON-like data, which
    it reads with :func:`read_settings`. Every process has one listening socket, which
    the next one gets if it ends. fixed: why no others can run beside them, if so.
    """

    def __init__(
        self,
        module: str,
        settings: Sequence[Any],
        drain_seconds: float,
        fixed: str = "",
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self._module, self._drain_seconds = module, drain_seconds
        self._fixed = fixed
        self._engines: dict[str, LocalEngine] = {}
        self._failed: asyncio.Future[None] | None = None
        """Done with the error of one that the server cannot start without."""
        self.is_started = False
        """Whether the server is: one that cannot start is only left then."""
        for each in settings:
            self._open(each)

    def __contains__(self, address: str) -> bool:
        return address in self._engines

    @property
    def addresses(self) -> list[str]:
        """Of all processes."""
        return list(self._engines)

    def _open(self, settings: Any) -> LocalEngine:
        listening = socket.create_server((HOST, 0))
        address = show_address(HOST, listening.getsockname()[1])
        engine = LocalEngine(address, listening, settings)
        self._engines[address] = engine
        return engine

    async def run(self) -> None:
        """Run all processes until it is cancelled.

        Raises :class:`~inl.errors.RunnerError` if one ends before it has ever served,
        unless the server is started.
        """
        self._failed = asyncio.get_running_loop().create_future()
        for engine in self._engines.values():
            engine.task = asyncio.create_task(self._keep(engine))
        try:
            await self._failed
        finally:
            engines = list(self._engines.values())
            tasks = [each.task for each in engines if each.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._stop, engines)

    async def add(self, like: str | None = None) -> str:
        """Start another process, which serves soon; returns its address.

        like: address of one whose settings it gets; by default those of the device with
        the fewest processes. Raises :class:`~inl.errors.RequestError` if there can be
        no other one.
        """
        if self._fixed:
            raise RequestError(self._fixed)
        if like is not None:
            settings = self._engines[like].settings
        else:
            all_settings = [each.settings for each in self._engines.values()]
            settings = min(all_settings, key=all_settings.count)
        engine = self._open(settings)
        engine.task = asyncio.create_task(self._keep(engine))
        return engine.address

    def restart(self, address: str) -> None:
        """Let a process finish its requests and end; another one starts then."""
        process = self._engines[address].process
        if process is not None:
            process.terminate()

    async def remove(self, address: str) -> None:
        """Let a process finish its requests and end."""
        engine = self._engines.pop(address, None)
        if engine is None:
            return  # it has failed
        if engine.task is not None:
            engine.task.cancel()
            await asyncio.gather(engine.task, return_exceptions=True)
        await asyncio.to_thread(self._stop, [engine])
        log.info("engine %s: is removed", address)

    async def _keep(self, engine: LocalEngine) -> None:
        """Run a process, and others after it."""
        has_served, pause = False, RESTART_SECONDS
        while True:
            began = time.monotonic()
            process = self._start(engine)
            while process.poll() is None:
                await asyncio.sleep(0.1)
            how = describe_exit(process.returncode)
            name = f"engine {engine.address} (process {process.pid})"
            assert process.stdout is not None, "a pipe"
            # Libraries may have written more before.
            serves = process.stdout.read().endswith(SERVES)
            self._close(process)
            if serves:
                has_served, pause = True, RESTART_SECONDS
                log.warning("%s: %s; another one starts", name, how)
            else:
                why = f"{how} before it had loaded the model; its output says why"
                if not has_served:
                    self._give_up(engine, f"{name}: {why}")
                    return
                log.warning("%s: %s; another one starts", name, why)
                pause = min(2 * pause, MOST_RESTART_SECONDS)
            await asyncio.sleep(max(pause + began - time.monotonic(), 0))

    def _give_up(self, engine: LocalEngine, reason: str) -> None:
        """Leave a process that has never served."""
        assert self._failed is not None, "it runs"
        if not self.is_started:
            if not self._failed.done():
                self._failed.set_exception(RunnerError(reason))
            return
        log.error("%s; it is left", reason)
        del self._engines[engine.address]
        engine.listening.close()

    def _start(self, engine: LocalEngine) -> subprocess.Popen[bytes]:
        listening = engine.listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(listening)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, SECRET: self.secret.hex()},
            pass_fds=(listening,),
            # So that Ctrl-C in a terminal reaches only this process.
            process_group=0,
        )
        engine.process = process
        log.info("engine %s: process %d starts", engine.address, process.pid)
        assert process.stdin is not None, "a pipe"
        with contextlib.suppress(BrokenPipeError):
            # Paths and devices have names.
            line = json.dumps(engine.settings, default=str)
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        return process

    def _stop(self, engines: Sequence[LocalEngine]) -> None:
        """Let processes finish, and kill those that take too long."""
        running = [each.process for each in engines if each.process is not None]
        for process in running:
            process.terminate()
        end = time.monotonic() + self._drain_seconds + EXIT_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
            process.kill()
            process.wait()
            self._close(process)
        for engine in engines:
            engine.listening.close()

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
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
