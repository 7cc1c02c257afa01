"""The engine's end of a link: answers the messages of one front-end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from inl.serve.api_error import ApiError
from inl.serve.frontends.calls import Calls
from inl.serve.frontends.forwarding import answer
from inl.serve.frontends.messages import (
    Answered,
    Check,
    Export,
    Failure,
    Forward,
    Leave,
    Message,
    ReadResponse,
    Recall,
    Recalled,
    Stop,
    StoredResponse,
    StoreResponse,
    Submit,
)
from inl.serve.frontends.transcripts import Transcripts

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import ASGIApp

    from inl.serve.frontends.link import Link
    from inl.serve.frontends.moving import Moving
    from inl.serve.models import Models
    from inl.serve.openai.response_store import ResponseStore


class EngineEnd:
    """Runs the calls of a front-end. Used by the event loop only.

    app: answers forwarded requests. responses: stored ones, if there are any.
    transcripts: shared with the other front-ends of the engine, if there are others.
    moving: of requests that go to other engines.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        responses: ResponseStore | None,
        link: Link,
        transcripts: Transcripts | None = None,
        moving: Moving | None = None,
    ) -> None:
        self._transcripts = Transcripts() if transcripts is None else transcripts
        self.calls = Calls(models, link, self._transcripts, moving)
        self._app, self._models, self._responses = app, models, responses
        self._link = link
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, message: Message) -> bool:
        """Begin to answer a message; whether it is one of a request."""
        if isinstance(message, Submit):
            self.calls.submit(message)
        elif isinstance(message, Leave):
            self.calls.leave(message)
        elif isinstance(message, Stop):
            self.calls.stop(message)
        elif isinstance(message, Export):
            self._start(self.calls.export(message.number))
        elif isinstance(message, Recall):
            found = self._transcripts.find(message.transcript, message.count)
            self._link.send(Recalled(message.number, *found))
        elif isinstance(message, Check):
            refusal = self._refusal(message.client)
            self._link.send(Answered(message.number, refusal))
        elif isinstance(message, Forward):
            self._start(self._forward(message))
        elif isinstance(message, StoreResponse | ReadResponse):
            self._start(self._store(message))
        else:
            return False
        return True

    async def abort(self) -> None:
        """End all calls: the front-end has ended."""
        await self.calls.abort()

    def _refusal(self, client: str) -> Failure | None:
        try:
            self._models.check_room(client)
        except ApiError as error:
            return Failure.of(error)
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _store(self, message: StoreResponse | ReadResponse) -> None:
        """Store or read a response."""
        store, client, name = self._responses, message.client, message.name
        assert store is not None, "front-ends know whether there is one"
        try:
            if isinstance(message, ReadResponse):
                data = await store.get(client, name)
                self._link.send(StoredResponse(message.number, data))
                return
            await store.put(client, name, message.data)
            self._link.send(Answered(message.number))
        except ApiError as error:
            self._link.send(Answered(message.number, Failure.of(error)))

    async def _forward(self, message: Forward) -> None:
        self._link.send(await answer(self._app, message))
