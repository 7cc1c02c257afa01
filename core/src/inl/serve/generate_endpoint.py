"""The endpoint of all dialects: reads a request, generates, writes the response."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from inl.serve.api_error import ApiError, as_api_error
from inl.serve.event_stream import (
    Disconnected,
    Receive,
    Send,
    disconnect_cancels,
    encode,
    end_stream,
    send_part,
    start_stream,
)
from inl.serve.http_messages import (
    decoded,
    read_body,
    send_encoded,
    send_error,
    written,
)
from inl.serve.job import Usage
from inl.serve.remote_images import ImageFetcher
from inl.serve.request_log import Record
from inl.serve.resuming import last_event_id, name_stream, numbered

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from inl.serve.dialect import Exchange, MakeExchange
    from inl.serve.generations import Generations
    from inl.serve.job import Job
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")


class GeneratingModel(Protocol):
    """A model that runs jobs, in this process or another one."""

    @property
    def name(self) -> str:
        """Its name in requests."""

    def identity_of(self, model: str | None) -> str:
        """Digest of what decides which tokens follow a prompt; empty if streams cannot
        go on behind another connection.

        model: as in requests, which may name an adapter.
        """

    def generate(
        self, job: Job, client: str
    ) -> AbstractAsyncContextManager[Generations]:
        """Admit a job, submit its prompts, and end it after the body."""


class Catalog(Protocol):
    """Models by name."""

    @property
    def default(self) -> GeneratingModel:
        """The model of requests that name none."""

    def find(self, name: str | None) -> GeneratingModel:
        """Return a model; raises :class:`ApiError` 404."""


class GenerateEndpoint:
    """ASGI application of one dialect.

    make: parses a body; see :data:`MakeExchange`. error_body: returns the body of an
    error.
    """

    def __init__(
        self,
        make: MakeExchange,
        error_body: Callable[[ApiError], dict[str, Any]],
        models: Catalog,
        config: ServerConfig,
    ) -> None:
        self._make = make
        self._error_body = error_body
        self._models = models
        self._config = config
        self._images = ImageFetcher(config.image_hosts)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request."""
        record: Record = scope["state"]["record"]
        try:
            client = scope["state"]["client"]
            body = await read_body(receive)
            name = self._models.default.name
            given = last_event_id(scope["headers"])
            number = record.number if given is None else given.origin.number
            exchange = await decoded(body, lambda body: self._make(body, number, name))
            await self.begin(exchange, client)
            model = self._models.find(exchange.job.model)
            record.model = model.name
            if exchange.job.stream:
                identity = model.identity_of(exchange.job.model)
                name_stream(exchange, scope, body, identity, given)
            del body
            async with disconnect_cancels(receive):
                job = await self._images.completed(exchange.job)
                async with model.generate(job, client) as generations:
                    del job  # the files of its images
                    exchange.token_text = generations.token_text
                    self.started(exchange, generations)
                    await self._respond(exchange, generations, send, record, client)
            record.phases = generations.items[0].phases
        except Disconnected:
            record.status = 499  # as reverse proxies log it
        except Exception as error:
            await self._fail(error, send, record)

    async def begin(self, exchange: Exchange, client: str) -> None:
        """Complete a request that refers to others; raises :class:`ApiError`."""

    def started(self, exchange: Exchange, generations: Generations) -> None:
        """Complete a response by what the model has been asked for."""

    async def end(self, exchange: Exchange, client: str) -> None:
        """Keep what later requests refer to, before the answer has been sent."""

    async def _fail(self, error: Exception, send: Send, record: Record) -> None:
        """Answer with an error.

        A frame of the error's traceback must not have it: the prompts would stay until
        the garbage collector finds them.
        """
        failure = as_api_error(error)
        if failure.status == 500:
            log.exception("request %s failed", record.number)
        record.error = failure.code or str(failure.status)
        await send_error(send, failure, self._error_body(failure))

    async def _respond(
        self,
        exchange: Exchange,
        generations: Generations,
        send: Send,
        record: Record,
        client: str,
    ) -> None:
        record.usage = generations.usage
        if exchange.job.stream:
            await self._stream(exchange, generations, send, record, client)
        else:
            async for item in generations.deltas(self._config.keep_alive_seconds):
                if item is not None:
                    record.began()
            items, usage = generations.items, generations.usage
            data = await written(items, lambda: encode(exchange.body(items, usage)))
            await self.end(exchange, client)
            await send_encoded(send, 200, data)
        record.usage = generations.usage
        if record.error is None:
            record.reasons = [item.finish_reason for item in generations.items]

    async def _stream(
        self,
        exchange: Exchange,
        generations: Generations,
        send: Send,
        record: Record,
        client: str,
    ) -> None:
        def usage() -> Usage:
            return generations.usage

        writer = numbered(exchange, generations)
        await start_stream(send, exchange.stream_format.media_type)
        if opening := writer.opening(generations.usage):
            await send_part(send, opening)
        last = b""
        try:
            async for item in generations.deltas(self._config.keep_alive_seconds):
                if item is None:
                    await send_part(send, exchange.stream_format.idle)
                    continue
                record.began()
                part = await written(item[1:], partial(writer.delta, *item, usage))
                if generations.finished:
                    last += part
                elif part:
                    await send_part(send, part)
            last += writer.closing(generations.items, generations.usage)
            await self.end(exchange, client)
        except Disconnected:
            raise
        except Exception as error:
            # The status has been sent: the stream reports the error.
            last += _failure(error, exchange, record)
        await end_stream(send, last)


def _failure(error: Exception, exchange: Exchange, record: Record) -> bytes:
    """Return the events of an error in mid-stream, which is not kept here either."""
    failure = as_api_error(error)
    log.warning("request %s failed: %s", record.number, failure.message)
    record.status = failure.status
    record.error = failure.code or str(failure.status)
    return exchange.failure(failure)
