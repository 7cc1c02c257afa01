"""Engines of other hosts that a place starts, such as a Ray cluster."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from inl.errors import InlError, RequestError
from inl.fleet.local_engines import EXIT_SECONDS, MOST_RESTART_SECONDS, RESTART_SECONDS
from inl.workers.placed_engine import PlacedEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inl.workers.address import WorkerAddress

log = logging.getLogger("inl.serve")

LOOK_SECONDS = 1.0
"""Time between two looks whether an engine runs."""


class PlacedEngines:
    """Engines with the same settings, each at the address that it has reported.

    module: their main program. settings: as JSON-like data. count: engines at first.
    One that ends is replaced, at another address.
    """

    def __init__(
        self,
        place: WorkerAddress,
        module: str,
        settings: Mapping[str, Any],
        count: int,
        drain_seconds: float,
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self.is_started = False
        """Whether the server is: one that cannot start is only left then."""
        self._place, self._module = place, module
        self._settings = {**settings, "secret": self.secret.hex()}
        self._count, self._drain_seconds = count, drain_seconds
        self._seats = itertools.count()
        self._engines: dict[str, PlacedEngine] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}
        """Those that keep engines running, and the addresses of these; empty before
        one has reported it."""
        self._failed: asyncio.Future[None] | None = None

    def __contains__(self, address: str) -> bool:
        return address in self._engines

    @property
    def addresses(self) -> list[str]:
        """Of the engines that have reported theirs."""
        return list(self._engines)

    async def run(self) -> None:
        """Keep engines running until it is cancelled.

        Raises the error of one that cannot be started, unless the server is.
        """
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        for _ in range(self._count):
            self._begin(loop.create_future())
        try:
            await self._failed
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            engines = list(self._engines.values())
            await asyncio.gather(*(self._stop(each) for each in engines))

    def _begin(self, address: asyncio.Future[str]) -> None:
        task = asyncio.create_task(self._keep(address))
        self._tasks[task] = ""
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def add(self, like: str | None = None) -> str:  # noqa: ARG002 - all are alike
        """Start another engine; returns its address once it has reported that.

        Raises the error of one that cannot be started.
        """
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._begin(address)
        return await address

    def restart(self, address: str) -> None:
        """Raise :class:`~inl.errors.RequestError`: no other one gets the address."""
        raise RequestError(
            f"address: the engine after {address} would have another one; accepts a "
            "roll that starts it beside the old one"
        )

    async def remove(self, address: str) -> None:
        """Let an engine finish its requests and end."""
        for task, kept in self._tasks.items():
            if kept == address:
                task.cancel()
        engine = self._engines.pop(address, None)
        if engine is not None:
            await self._stop(engine)
            log.info("engine %s: is removed", address)

    async def _stop(self, engine: PlacedEngine) -> None:
        await asyncio.to_thread(engine.stop, self._drain_seconds + EXIT_SECONDS)

    async def _keep(self, address: asyncio.Future[str]) -> None:
        """Run an engine, and others after it."""
        pause, task = RESTART_SECONDS, asyncio.current_task()
        assert task is not None, "it runs in one"
        while True:
            began = time.monotonic()
            try:
                engine = await self._start()
            except InlError as error:
                if not address.done():
                    address.set_exception(error)
                    self._give_up(error)
                    address.exception()  # unread for those that start with the server
                    return
                log.warning("an engine cannot be started: %s; it is tried again", error)
                pause = min(2 * pause, MOST_RESTART_SECONDS)
            else:
                self._engines[engine.address] = engine
                self._tasks[task] = engine.address
                log.info("engine %s: %s starts", engine.address, engine.name)
                if not address.done():
                    address.set_result(engine.address)
                while await asyncio.to_thread(engine.is_alive):
                    await asyncio.sleep(LOOK_SECONDS)
                del self._engines[engine.address]
                self._tasks[task] = ""  # not ended with the engine that is lost
                lost = await asyncio.to_thread(engine.lost)
                log.warning("%s; another one starts", lost)
                pause = RESTART_SECONDS
            await asyncio.sleep(max(pause + began - time.monotonic(), 0))

    async def _start(self) -> PlacedEngine:
        """Start an engine; one that is not awaited any more is stopped."""
        starting = asyncio.create_task(
            asyncio.to_thread(
                PlacedEngine, self._place, self._module, self._settings,
                next(self._seats),
            )
        )  # fmt: skip
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_stop_late)
            raise

    def _give_up(self, error: InlError) -> None:
        """Leave an engine that cannot be started."""
        assert self._failed is not None, "it runs"
        if self.is_started:
            log.error("an engine cannot be started: %s", error)
        elif not self._failed.done():
            self._failed.set_exception(error)


def _stop_late(starting: asyncio.Task[PlacedEngine]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().stop(0.0)
