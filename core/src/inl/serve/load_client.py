"""Sends streaming requests to any OpenAI server and measures them."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from inl.bounded_json import parse_json, parse_object
from inl.errors import RequestError


@dataclass(slots=True)
class Sample:
    """One request: its times in seconds since it was sent."""

    status: int = 0
    error: str = ""
    token_times: list[float] = field(default_factory=list)
    """Time of each event with text."""
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def first_token_seconds(self) -> float:
        """Time to the first token."""
        return self.token_times[0]

    @property
    def inter_token_seconds(self) -> float | None:
        """Mean time between tokens; ``None`` for fewer than two."""
        steps = self.completion_tokens - 1
        if steps < 1 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / steps


class LoadClient:
    """Sends chat requests to one server.

    api_key: sent with each, if not ``None``. seconds: limit of a whole request.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, seconds: float = 600.0
    ) -> None:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise RequestError(f"url: found {url!r:.80}, accepts http://HOST:PORT")
        self._host = address.hostname
        self._is_secure = address.scheme == "https"
        self._port = address.port or (443 if self._is_secure else 80)
        self._base = address.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._seconds = seconds

    async def model(self) -> str:
        """Return the name of the server's first model."""
        try:
            async with asyncio.timeout(self._seconds):
                answer = self._request("GET", "/v1/models")
                status, *parts = [part async for part in answer]
        except TimeoutError as error:
            raise RequestError(
                f"{self._host}:{self._port}: found no answer of /v1/models within "
                f"{self._seconds:g} s (--timeout)"
            ) from error
        if status in (b"401", b"403"):
            raise RequestError(
                f"{self._host}:{self._port}: found status {status.decode()}; needs a "
                "key that the server accepts (--api-key)"
            )
        body = b"".join(parts)
        try:
            return str(parse_json(body, "/v1/models")["data"][0]["id"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise RequestError(
                f"/v1/models: found status {status.decode()} with {body[:120]!r}, "
                "accepts a list of models as of OpenAI's API"
            ) from error

    async def measure(self, body: dict[str, Any]) -> Sample:
        """Send a streaming chat request and return its times."""
        sample, began = Sample(), time.perf_counter()
        held, is_done = b"", False
        try:
            async with asyncio.timeout(self._seconds):
                async for part in self._request("POST", "/v1/chat/completions", body):
                    if not sample.status:
                        sample.status = int(part)
                        continue
                    held += part
                    if sample.status != 200:
                        continue
                    *lines, held = held.split(b"\n")
                    now = time.perf_counter() - began
                    for line in lines:
                        is_done |= _apply(sample, line.rstrip(b"\r"), now)
        except TimeoutError:
            sample.error = f"no end within {self._seconds:g} s"
        except (
            OSError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            sample.error = f"{type(error).__name__}: {error}"
        if sample.status != 200:
            sample.error = sample.error or held.decode("utf-8", "replace")[:200]
        elif not is_done:
            sample.error = sample.error or "the stream ended without [DONE]"
        # A server that reports no usage sends about one token an event.
        sample.completion_tokens = sample.completion_tokens or len(sample.token_times)
        sample.seconds = time.perf_counter() - began
        return sample

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the status, then the parts of the body of a response."""
        secure = ssl.create_default_context() if self._is_secure else None
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=secure, limit=1 << 20
        )
        try:
            data = b"" if body is None else json.dumps(body).encode()
            writer.write(self._head(method, path, len(data)) + data)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            status, _, rest = head.partition(b"\r\n")
            if not status.startswith(b"HTTP/1."):
                raise ValueError(f"found {status[:40]!r}, which is no HTTP status")
            yield status.split()[1]
            chunked = b"transfer-encoding: chunked" in rest.lower()
            async for part in _chunks(reader) if chunked else _whole(reader):
                yield part
        finally:
            writer.close()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._base}{path} HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {length}",
        ]
        if self._key is not None:
            lines.append(f"authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _whole(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(1 << 16):
        yield part


def _apply(sample: Sample, line: bytes, now: float) -> bool:
    """Record a line of a stream; returns whether it is the last one."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return data == b"[DONE]"
    value = parse_object(data, "event")
    if value.get("error") is not None:
        sample.error = str(value["error"])[:200]
        return False
    usage = value.get("usage") or {}
    sample.prompt_tokens = usage.get("prompt_tokens", sample.prompt_tokens)
    sample.completion_tokens = usage.get("completion_tokens", sample.completion_tokens)
    deltas = [choice.get("delta") or {} for choice in value.get("choices") or ()]
    if any(delta.get("content") or delta.get("reasoning_content") for delta in deltas):
        sample.token_times.append(now)
    return False


async def run_load(
    client: LoadClient,
    bodies: Sequence[dict[str, Any]],
    arrivals: Sequence[float],
    concurrency: int,
    tick: Callable[[], None],
) -> list[Sample]:
    """Send a request at each arrival time, in seconds from now.

    concurrency: most requests that are open at the same time. tick: called after each.
    """
    began = time.perf_counter()
    free = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any], arrival: float) -> Sample:
        await asyncio.sleep(max(arrival - (time.perf_counter() - began), 0))
        async with free:
            sample = await client.measure(body)
        tick()
        return sample

    jobs = zip(bodies, arrivals, strict=True)
    return await asyncio.gather(*(one(body, arrival) for body, arrival in jobs))
