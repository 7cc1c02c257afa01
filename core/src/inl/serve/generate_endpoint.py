"""The endpoint of all dialects: reads a request, generates, writes the response."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from inl.serve.api_error import ApiError, as_api_error
from inl.serve.event_stream import (
    COMMENT,
    Disconnected,
    Receive,
    Send,
    disconnect_cancels,
    encode,
    end_stream,
    send_part,
    start_stream,
)
from inl.serve.gate import read_body
from inl.serve.job import Answer, Usage
from inl.serve.request_log import Record

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from inl.serve.dialect import Dialect, Exchange
    from inl.serve.generations import Generations
    from inl.serve.job import Job
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")


class GeneratingModel(Protocol):
    """A model that runs jobs, in this process or another one."""

    @property
    def name(self) -> str:
        """Its name in requests."""

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
    """ASGI application of one dialect."""

    def __init__(self, dialect: Dialect, models: Catalog, config: ServerConfig) -> None:
        self._dialect = dialect
        self._models = models
        self._config = config

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request."""
        record: Record = scope["state"]["record"]
        try:
            client = scope["state"]["client"]
            body = await read_body(receive)
            exchange = self._dialect.read(body, record.number)
            del body
            model = self._models.find(exchange.job.model)
            record.model = model.name
            async with (
                disconnect_cancels(receive),
                model.generate(
                    replace(exchange.job, number=record.number), client
                ) as generations,
            ):
                exchange.token_text = generations.token_text
                await self._respond(exchange, generations, send, record)
            record.phases = generations.items[0].phases
        except Disconnected:
            record.status = 499  # as reverse proxies log it
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                log.exception("request %s failed", record.number)
            record.error = failure.code or str(failure.status)
            await send_error(send, failure, self._dialect.error(failure))

    async def _respond(
        self,
        exchange: Exchange,
        generations: Generations,
        send: Send,
        record: Record,
    ) -> None:
        answers = [Answer() for _ in generations.items]
        record.usage = generations.usage
        if exchange.job.stream:
            await self._stream(exchange, generations, answers, send, record)
        else:
            async for item in generations.deltas(self._config.keep_alive_seconds):
                if item is not None:
                    index, delta = item
                    record.began()
                    answers[index].add(delta)
            body = exchange.body(answers, generations.usage)
            await send_json(send, 200, body)
        record.usage = generations.usage
        if record.error is None:
            record.reasons = [answer.finish_reason for answer in answers]

    async def _stream(
        self,
        exchange: Exchange,
        generations: Generations,
        answers: list[Answer],
        send: Send,
        record: Record,
    ) -> None:
        def usage() -> Usage:
            return generations.usage

        await start_stream(send, [])
        if opening := exchange.opening(generations.usage):
            await send_part(send, opening)
        last = b""
        try:
            async for item in generations.deltas(self._config.keep_alive_seconds):
                if item is None:
                    await send_part(send, COMMENT)
                    continue
                index, delta = item
                record.began()
                answers[index].add(delta)
                part = exchange.delta(index, delta, usage)
                if generations.finished:
                    last = part
                elif part:
                    await send_part(send, part)
            last += exchange.closing(answers, generations.usage)
        except Disconnected:
            raise
        except Exception as error:
            # The status has been sent: the stream reports the error.
            failure = as_api_error(error)
            log.warning("request %s failed: %s", record.number, failure.message)
            record.status = failure.status
            record.error = failure.code or str(failure.status)
            last += exchange.failure(failure)
        await end_stream(send, last)


async def send_json(
    send: Send, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    """Send a response with a JSON body."""
    data = encode(body)
    pairs = {"content-type": "application/json", "content-length": str(len(data))}
    lines = [(k.encode(), v.encode()) for k, v in (pairs | (headers or {})).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: ApiError, body: Any) -> None:
    """Send an error response."""
    await send_json(send, error.status, body, error.headers)
