"""Calls that do not generate, with bounds and threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from inl.serve.admission import Admission, Ticket
from inl.serve.http_messages import read_body

if TYPE_CHECKING:
    from starlette.requests import Request

    from inl.serve.models import Models
    from inl.serve.settings import ServerConfig

T = TypeVar("T")

QUEUE = 64
"""Calls that wait; more are refused with 503."""


class BoundedCalls:
    """Admits calls and runs their work on threads.

    They neither take the place of requests that generate nor delay them. name: of the
    threads. running: calls that run at the same time.
    """

    def __init__(
        self, models: Models, config: ServerConfig, *, name: str, running: int
    ) -> None:
        self._models = models
        self._threads = ThreadPoolExecutor(running, name)
        self.admission = Admission(
            max_running=running,
            max_queue=QUEUE,
            max_queued_tokens=config.max_queued_tokens,
            max_per_client=config.max_per_key,
            clients=models.clients,
        )

    @asynccontextmanager
    async def admitted(self, request: Request) -> AsyncIterator[tuple[Ticket, bytes]]:
        """Read the body of a request, then admit it; raises :class:`ApiError`.

        A client that sends slowly takes no place from others.
        """
        self.admission.is_draining = self._models.is_draining
        self.admission.check(request.state.client)
        body = await read_body(request.receive)
        ticket = Ticket(request.state.client, 1)
        self.admission.enter(ticket)
        finished = False
        try:
            yield ticket, body
            finished = True
        finally:
            self.admission.leave(ticket, finished=finished)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, called on a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work)
