"""Requests of which nothing is generated, answered here or by an engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from inl.fleet.continuing import EngineGoneError
from inl.fleet.engine_link import State
from inl.serve.frontends.forwarding import answer
from inl.serve.frontends.messages import Forward, Forwarded, Recall, Recalled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from starlette.types import ASGIApp

    from inl.fleet.engine_link import EngineLink
    from inl.fleet.members import Members

START_SECONDS = 5.0
"""Time that a new call waits for an engine, if none is ready."""

STILL_THERE = (State.READY, State.DRAINING)
"""States in which an engine knows what it has generated."""


class Questions:
    """Asks engines. numbers: gives questions numbers that nothing else has.

    app: answers the paths of ``own``, and those that begin with one of ``own_under``;
    engines answer the others.
    """

    def __init__(self, members: Members, numbers: Callable[[int], int]) -> None:
        self._members, self._numbers = members, numbers
        self.app: ASGIApp | None = None
        self.own: Collection[str] = ()
        self.own_under: tuple[str, ...] = ()
        self._asked: dict[int, tuple[EngineLink, asyncio.Future[Any]]] = {}
        """By number."""

    async def forward(self, message: Forward) -> Forwarded:
        """Answer a request here, or by an engine; raises :class:`ApiError`."""
        if message.path in self.own or message.path.startswith(self.own_under):
            assert self.app is not None, "set before requests are accepted"
            return await answer(self.app, message)
        end = time.monotonic() + START_SECONDS
        while True:
            choice = self._members.router.choose([], 1)
            if choice is None:
                await self._members.wait_for_engine(end)
                continue
            engine = self._members.by_number[choice[0]]
            try:
                answered: Forwarded = await self._ask(engine, message)
            except EngineGoneError:
                continue
            return answered

    async def recall(self, number: int, message: Recall) -> Recalled:
        """Ask an engine for outputs; it remembers none if it is lost."""
        for engine in self._members.by_number.values():
            if engine.name == message.engine and engine.state in STILL_THERE:
                with suppress(EngineGoneError):
                    recalled: Recalled = await self._ask(engine, message)
                    return recalled
        return Recalled(number, [[]] * message.count, [0] * message.count)

    async def _ask(self, engine: EngineLink, message: Forward | Recall) -> Any:
        """Return an engine's answer; raises :class:`EngineGoneError`."""
        number = message.number = self._numbers(1)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = engine, future
        engine.send(message)
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def answered(self, message: Forwarded | Recalled) -> None:
        """Take the answer of an engine."""
        waiting = self._asked.pop(message.number, None)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)

    def count(self, engine: EngineLink) -> int:
        """Return how many an engine has not answered."""
        return sum(used is engine for used, _ in self._asked.values())

    def abandon(self, engine: EngineLink) -> None:
        """Ask other engines what one has not answered."""
        for number, (used, future) in list(self._asked.items()):
            if used is engine and not future.done():
                del self._asked[number]
                future.set_exception(EngineGoneError())
