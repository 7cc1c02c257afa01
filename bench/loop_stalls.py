"""The command ``inl`` with a record of how long its event loop computed at a time.

    python bench/loop_stalls.py FILE serve --port 8000

A timer of the loop is due each millisecond. Between two of its calls the loop's thread
computes and waits; only its processor time counts, so that other programs of a busy
machine do not. The longest time, and the longest collection of garbage on any thread,
are written to FILE, which :class:`Stalls` reads meanwhile. Processes of ``--frontends``
have loops of their own, which are not measured.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TICK = 0.001
RECORD = struct.Struct("dd")
"""Seconds of the longest time between two ticks, and of the longest collection."""


class Stalls:
    """The record of a process, which another one may read and reset."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(RECORD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), RECORD.size)

    @property
    def seconds(self) -> tuple[float, float]:
        """The longest time of the loop, and the longest collection, since the reset."""
        loop, collection = RECORD.unpack(self._memory[:])
        return loop, collection

    def reset(self) -> None:
        self._memory[:] = bytes(RECORD.size)

    def record(self, loop: float = 0.0, collection: float = 0.0) -> None:
        longest = self.seconds
        if loop > longest[0] or collection > longest[1]:
            latest = max(loop, longest[0]), max(collection, longest[1])
            self._memory[:] = RECORD.pack(*latest)


def watched(make: Callable[[], Any], stalls: Stalls) -> asyncio.AbstractEventLoop:
    """Return an event loop that records its stalls."""
    loop: asyncio.AbstractEventLoop = make()
    latest = time.thread_time()

    def tick() -> None:
        nonlocal latest
        now = time.thread_time()
        stalls.record(loop=now - latest)
        latest = now
        loop.call_later(TICK, tick)

    loop.call_soon(tick)
    return loop


def watch_collections(stalls: Stalls) -> None:
    """Record the longest collection of garbage."""
    began = 0.0

    def on_collection(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            stalls.record(collection=time.thread_time() - began)

    gc.callbacks.append(on_collection)


def main() -> None:
    from inl.cli.main import main as inl
    from inl.serve import http_server

    stalls = Stalls(Path(sys.argv.pop(1)))
    make = http_server.loop_factory() or asyncio.new_event_loop
    http_server.loop_factory = lambda: lambda: watched(make, stalls)
    watch_collections(stalls)
    raise SystemExit(inl())


if __name__ == "__main__":
    main()
