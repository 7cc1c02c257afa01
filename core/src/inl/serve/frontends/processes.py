"""Starts front-end processes, answers them, and replaces those that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from inl.errors import RunnerError
from inl.serve.frontends.engine_end import EngineEnd
from inl.serve.frontends.link import Link
from inl.serve.frontends.messages import (
    Drain,
    Message,
    ModelSettings,
    Named,
    Names,
    Ping,
    Pong,
    Ready,
    Settings,
    Trouble,
)
from inl.serve.http_server import listen_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import ASGIApp

    from inl.serve.models import Models
    from inl.serve.openai.response_store import ResponseStore
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")

RESTART_SECONDS = 1.0
"""Least time between two starts of a front-end."""

START_SECONDS = 300.0
"""Time until a front-end accepts connections."""

PING_PARTS = 10
"""Waits for a reply. One of them ends late if this process itself was stopped, so that
a front-end still has the time of the others."""

EXIT_SECONDS = 10.0
"""Time to exit, beyond that of open requests, before a front-end is killed."""


SILENT_SECONDS = 3.0
"""Time without a reply after which a front-end is no longer ready."""


class FrontEnd:
    """One front-end process at a time, on one listening socket.

    settings: returns the first message to a process. seconds: time after which a
    process that does not reply is killed. responses: stored ones, if there are any.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        settings: Callable[[], Settings],
        listening: socket.socket,
        seconds: float,
        responses: ResponseStore | None,
    ) -> None:
        self.ready = asyncio.Event()
        """Whether it has accepted connections."""
        self._is_accepting = False
        self._troubles: dict[str, str] = {}
        """Problems of its process by name of the model."""
        self.listening = listening
        self._app, self._models, self._settings = app, models, settings
        self._seconds = seconds
        self._responses = responses
        self._replied = asyncio.Event()
        """Set when the process accepts connections, and at each :class:`Pong`."""
        self._pinged = 0.0
        """When the last :class:`Ping` was sent, in seconds of the monotonic clock."""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._end: EngineEnd | None = None
        self._named: asyncio.Future[None] | None = None
        """Done once the process knows the names that were sent last."""
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None, "started"
        return self._process.pid

    @property
    def problem(self) -> str | None:
        """Why its process would not answer the next request."""
        if not self._is_accepting:
            return "a front-end is being started"
        silent = time.monotonic() - self._pinged
        if not self._replied.is_set() and silent > SILENT_SECONDS:
            return f"a front-end has not replied for {silent:.0f} s"
        return next(iter(self._troubles.values()), None)

    async def run(self) -> None:
        """Run until :meth:`stop`; starts another process if one ends before.

        Raises :class:`~inl.errors.RunnerError` if the first one ends before it accepts
        connections.
        """
        while True:
            began = time.monotonic()
            status = await self._run_once()
            if self._is_stopping:
                return
            if not self.ready.is_set():
                raise RunnerError(
                    f"front-end: ended with exit status {status} before it accepted "
                    "connections; its output says why"
                )
            log.warning(
                "a front-end ended with exit status %s: its requests were aborted, and "
                "another one starts",
                status,
            )
            lived = time.monotonic() - began
            await asyncio.sleep(max(RESTART_SECONDS - lived, 0))

    async def _run_once(self) -> int:
        """Run one process to its end, and return its exit status."""
        lost = asyncio.Event()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "inl.serve.frontends.main"]
        listening = self.listening.fileno()
        with theirs:
            self._process = process = subprocess.Popen(
                [*command, "--link", str(theirs.fileno()), "--listen", str(listening)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), listening),
                # So that Ctrl-C in a terminal reaches only this process.
                process_group=0,
            )
        watching: asyncio.Task[None] | None = None
        try:
            link = await Link.open(ours, self._receive, lost.set, self._resumed)
            self._link = link
            self._end = EngineEnd(self._app, self._models, self._responses, link)
            link.send(self._settings())
            watching = asyncio.create_task(self._watch(link, process))
            await lost.wait()
        finally:
            if watching is not None:
                watching.cancel()
            self._is_accepting = False
            self._troubles.clear()
            if self._link is not None:
                self._link.close()
                self._link = None
            self._know_names()
            if self._end is not None:
                await self._end.abort()
            status = await asyncio.to_thread(_wait, process)
        return status

    async def _watch(self, link: Link, process: subprocess.Popen[bytes]) -> None:
        """Kill a process that does not reply, which ends all waits for it."""
        self._replied.clear()
        seconds = START_SECONDS
        while await self._replies_within(seconds):
            seconds = self._seconds
            await asyncio.sleep(seconds / PING_PARTS)
            self._replied.clear()
            self._pinged = time.monotonic()
            link.send(Ping())
        log.warning("a front-end did not reply for %g s and was killed", seconds)
        process.kill()

    async def _replies_within(self, seconds: float) -> bool:
        for _ in range(PING_PARTS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds / PING_PARTS):
                    await self._replied.wait()
                return True
        return False

    def stop(self, *, force: bool) -> None:
        """Finish the open requests and exit."""
        self._is_stopping = True
        if self._link is not None:
            self._link.send(Drain(force))

    async def announce(self, names: Names) -> None:
        """Send the names of models to the process, and wait until it uses them."""
        if self._link is not None:
            self._named = asyncio.get_running_loop().create_future()
            self._link.send(names)
            await self._named

    def _know_names(self) -> None:
        if self._named is not None and not self._named.done():
            self._named.set_result(None)

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self._process is not None:
            self._process.kill()

    def _resumed(self) -> None:
        assert self._end is not None, "made before anything is sent"
        self._end.calls.flush()

    def _receive(self, message: Message) -> None:
        end = self._end
        assert end is not None, "made before the other end writes"
        if end.receive(message):
            return
        if isinstance(message, Named):
            self._know_names()
        elif isinstance(message, Pong):
            self._replied.set()
        elif isinstance(message, Trouble):
            self._troubles.pop(message.model, None)
            if message.problem is not None:
                self._troubles[message.model] = message.problem
        elif isinstance(message, Ready):
            self.ready.set()
            self._replied.set()
            self._is_accepting = True
            if self._is_stopping and self._link is not None:
                self._link.send(Drain(force=False))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that has closed its link."""
    try:
        return process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class FrontEnds:
    """All front-end processes of a server.

    places: where the tokenizer of each model is, and its greatest number of tokens.
    responses: stored ones, if there are any.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        config: ServerConfig,
        places: Mapping[str, tuple[str | None, int | None]],
        responses: ResponseStore | None,
    ) -> None:
        self._app, self._models = app, models
        self._config, self._places = config, places
        self._responses = responses
        self.processes: list[FrontEnd] = []
        self._is_stopping = False

    def settings(self) -> Settings:
        """Return what a front-end needs to know."""
        has_access_log = not logging.getLogger("inl.serve.access").disabled
        return Settings(self._config, self._model_settings(), has_access_log)

    def _model_settings(self) -> list[ModelSettings]:
        return [
            ModelSettings(slot.name, slot.adapters, *self._places[slot.name])
            for slot in self._models
        ]

    def problem(self) -> str | None:
        """Return why one of the processes would not answer the next request."""
        return next((each.problem for each in self.processes if each.problem), None)

    async def announce(self) -> None:
        """Send the names of models to all front-ends, and wait until they use them."""
        names = Names(self._model_settings())
        await asyncio.gather(*(each.announce(names) for each in self.processes))

    async def run(self, started: Callable[[int], None]) -> None:
        """Serve until :meth:`stop`; started: called with the port.

        Raises :class:`~inl.errors.RequestError` and
        :class:`~inl.errors.RunnerError`.
        """
        server = self._config
        sockets = listen_shared(server.host, server.port, server.frontends)
        self.processes = [
            FrontEnd(
                self._app,
                self._models,
                self.settings,
                each,
                server.frontend_seconds,
                self._responses,
            )
            for each in sockets
        ]
        tasks = [asyncio.create_task(each.run()) for each in self.processes]
        running: asyncio.Future[Any] = asyncio.gather(*tasks)
        all_ready: asyncio.Future[Any] = asyncio.gather(
            *(each.ready.wait() for each in self.processes)
        )
        try:
            await asyncio.wait([all_ready, running], return_when="FIRST_COMPLETED")
            if all_ready.done():
                started(sockets[0].getsockname()[1])
            await running
        finally:
            for each in self.processes:
                each.listening.close()
            all_ready.cancel()
            self.kill()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RunnerError):
                await asyncio.gather(*tasks)

    def stop(self) -> None:
        """Accept nothing more, and end once all open requests have finished.

        A second call ends them.
        """
        for each in self.processes:
            each.stop(force=self._is_stopping)
        if not self._is_stopping:
            seconds = self._config.drain_seconds + EXIT_SECONDS
            asyncio.get_running_loop().call_later(seconds, self.kill)
        self._is_stopping = True

    def kill(self) -> None:
        """End all processes at once."""
        for each in self.processes:
            each.kill()
