"""A server process for the measurements of ``inl serve``, and a client of it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

READY = re.compile(r" at http://(\S+):(\d+),")


@contextmanager
def server(
    *options: str, program: Sequence[str] = ("-m", "inl")
) -> Iterator[tuple[str, int, int]]:
    """Yield host, port and process id of ``inl serve``, in this environment.

    program: arguments of Python in front of ``serve``.
    """
    command = [sys.executable, *program, "serve", "--port", "0", *options]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--no-access-log"], stderr=log)
        try:
            while not (found := READY.search(Path(log.name).read_text())):
                if process.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text())
                time.sleep(0.1)
            yield found[1], int(found[2]), process.pid
        finally:
            process.terminate()
            process.wait()


async def get(host: str, port: int, path: str, key: str | None = None) -> Any:
    """Return the body of an answer; key: of the API."""
    return (await _request("GET", host, port, path, b"", key))[2]


async def post(
    host: str, port: int, path: str, body: dict[str, Any], key: str | None = None
) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and body of an answer; key: of the API."""
    return await _request("POST", host, port, path, json.dumps(body).encode(), key)


async def _request(
    method: str, host: str, port: int, path: str, data: bytes, key: str | None = None
) -> tuple[int, dict[str, str], Any]:
    """Send a request on a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        if key is not None:
            head += f"authorization: Bearer {key}\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read(-1)
    finally:
        writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(rest)
