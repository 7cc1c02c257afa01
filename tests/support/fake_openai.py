"""A minimal OpenAI server whose answers, also malformed ones, a test configures."""

from __future__ import annotations

import asyncio
import json
import threading
import time

SSE = "content-type: text/event-stream\r\n"


def event(body, end="\n"):
    return f"data: {json.dumps(body)}{end}{end}".encode()


def token(text="a"):
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def usage(prompt, completion):
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": counts}


class FakeServer:
    """Sends the next of ``answers`` for each request; a context manager.

    An answer is a list of parts: head lines or bytes, and functions to call between
    them. models: the answer to a request for the list of models.
    """

    def __init__(self, answers, models=None):
        self.answers = list(answers)
        self.models = models or plain(200, {"data": [{"id": "fake"}]})
        self.bodies, self.times = [], []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(300)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(300)

    async def _serve(self):
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        async with server:
            await self._end.wait()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = await reader.readexactly(length)
        if head.startswith("get /v1/models"):
            parts = self.models
        else:
            self.times.append(time.monotonic())
            self.bodies.append(json.loads(body))
            parts = self.answers.pop(0)
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            else:
                await asyncio.to_thread(part)
        writer.close()


def plain(status, body):
    """Return an answer that is no stream."""
    data = json.dumps(body).encode()
    return [
        f"HTTP/1.1 {status} x\r\ncontent-length: {len(data)}\r\n\r\n".encode(),
        data,
    ]


def stream(*parts):
    """Return a stream that ends with the connection."""
    return [f"HTTP/1.1 200 OK\r\n{SSE}\r\n".encode(), *parts]


def chunked(*parts, size=7):
    """Return a stream in chunks that end anywhere."""
    data = b"".join(parts)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    framed = [f"{len(each):x}\r\n".encode() + each + b"\r\n" for each in pieces]
    head = f"HTTP/1.1 200 OK\r\n{SSE}transfer-encoding: chunked\r\n\r\n".encode()
    return [head, *framed, b"0\r\n\r\n"]
