"""The engine's process, as a front-end sees it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inl.serve.api_error import ApiError
from inl.serve.frontends.link import Link
from inl.serve.frontends.messages import (
    Answered,
    Check,
    Drain,
    Forwarded,
    Message,
    ModelSettings,
    Named,
    Names,
    News,
    Ping,
    Pong,
    Settings,
    StoredResponse,
)
from inl.serve.frontends.outputs import Outputs

if TYPE_CHECKING:
    from inl.serve.frontends.messages import ToEngine


class EngineClient:
    """Sends requests to the engine's process. Used by the event loop only.

    drain: called with :class:`Drain`, and when the engine's process has ended.
    """

    def __init__(self, drain: Callable[[bool], None]) -> None:
        self.settings: asyncio.Future[Settings] = (
            asyncio.get_running_loop().create_future()
        )
        """The first message."""
        self.names: dict[str, int] = {}
        """Names of models and adapters -> positions of the models."""
        self.outputs = Outputs()
        self._drain = drain
        self._link: Link | None = None
        self._next = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}

    async def connect(self, end: socket.socket) -> None:
        """Use one end of a socket pair."""
        self._link = await Link.open(end, self._receive, self._lost)

    def identity_of(self, model: str | None) -> str:  # noqa: ARG002 - none has one
        """Return nothing: streams end with their connections."""
        return ""

    def numbers(self, count: int) -> int:
        """Return the first of ``count`` numbers that nothing else has."""
        first, self._next = self._next, self._next + count
        return first

    def send(self, message: ToEngine) -> None:
        """Send a message; nothing if the engine's process has ended."""
        if self._link is not None:
            self._link.send(message)

    async def call(self, number: int, message: ToEngine) -> Any:
        """Send a message and return its reply; raises :class:`ApiError`."""
        if self._link is None:
            raise _ended()
        reply = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._link.send(message)
            return await reply
        finally:
            del self._replies[number]

    async def check_room(self, client: str) -> None:
        """Raise :class:`ApiError` 429 or 503 if no model would admit a call."""
        number = self.numbers(1)
        await self.call(number, Check(number, client))

    def close(self) -> None:
        """Close the link."""
        if self._link is not None:
            self._link.close()

    def _receive(self, message: Message) -> None:
        if isinstance(message, News):
            self.outputs.apply(message)
        elif isinstance(message, Answered | Forwarded | StoredResponse):
            reply = self._replies.get(message.number)
            if reply is None or reply.done():
                return
            failure = message.failure if isinstance(message, Answered) else None
            if failure is None:
                reply.set_result(message)
            else:
                reply.set_exception(failure.error())
        elif isinstance(message, Settings):
            self._name(message.models)
            self.settings.set_result(message)
        elif isinstance(message, Names):
            self._name(message.models)
            self.send(Named())
        elif isinstance(message, Ping):
            self.send(Pong())
        elif isinstance(message, Drain):
            self._drain(message.force)

    def _name(self, models: Sequence[ModelSettings]) -> None:
        self.names = {
            name: position
            for position, each in enumerate(models)
            for name in (each.name, *each.adapters)
        }

    @property
    def is_connected(self) -> bool:
        """Whether the engine's process runs."""
        return self._link is not None

    def _lost(self) -> None:
        self._link = None
        if not self.settings.done():
            self.settings.set_exception(_ended())
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_ended())
        self.outputs.fail(_ended())
        self._drain(False)


def _ended() -> ApiError:
    return ApiError(503, "the engine's process has ended", code="engine_ended")
