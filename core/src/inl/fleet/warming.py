"""Recent prompts, which an engine computes before it gets requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from inl.fleet.prefix_index import BLOCK_TOKENS
from inl.serve.frontends.messages import Leave, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inl.fleet.engine_link import EngineLink

log = logging.getLogger("inl.serve")

WARM_PROMPTS = 8
"""Recent prompts that an engine computes before it gets requests."""

WARM_TOKENS = 4096
"""Tokens of each, at most."""

WARM_SECONDS = 30.0
"""Time after which it gets requests in any case."""


class Warming:
    """Warms engines up. numbers: gives calls numbers that nothing else has."""

    def __init__(self, numbers: Callable[[int], int]) -> None:
        self._numbers = numbers
        self.recent: deque[Submit] = deque(maxlen=WARM_PROMPTS)
        """Newest calls, each of another prompt."""
        self.open: dict[int, asyncio.Future[None]] = {}
        """Done once such a call has ended on an engine, by its number."""
        self.tasks: set[asyncio.Task[None]] = set()

    def remember(self, message: Submit) -> None:
        """Keep a prompt to warm engines up, unless one begins as it does."""
        if message.options.get("images"):
            return
        start = message.prompts[0][:BLOCK_TOKENS]
        for each in self.recent:
            if each.prompts[0][:BLOCK_TOKENS] == start:
                return
        self.recent.append(message)

    def begin(self, engine: EngineLink) -> None:
        """Let an engine compute recent prompts, and then give it requests."""
        engine.is_warming = True
        task = asyncio.create_task(self._warm(engine, list(self.recent)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _warm(self, engine: EngineLink, calls: Sequence[Submit]) -> None:
        loop, ends = asyncio.get_running_loop(), []
        await asyncio.sleep(0)  # it is opened first
        for call in calls:
            number = self._numbers(1)
            future = self.open[number] = loop.create_future()
            ends.append(future)
            options = {"max_tokens": 1, "seed": 0}
            if (salt := call.options.get("cache_salt")) is not None:
                options["cache_salt"] = salt
            prompt = call.prompts[0][:WARM_TOKENS]
            message = Submit(
                number, call.model, call.client, [prompt], options, 1, None, "warm-up"
            )
            engine.send(message)
        began = time.monotonic()
        try:
            await asyncio.wait(ends, timeout=WARM_SECONDS)
        finally:
            done = sum(future.done() for future in ends)
            numbers = [n for n, future in self.open.items() if future in ends]
            for number in numbers:
                del self.open[number]
                engine.send(Leave(number, finished=True))
            log.info(
                "engine %s: has computed %d of %d recent prompts in %.1f s",
                engine.address, done, len(ends), time.monotonic() - began,
            )  # fmt: skip
            engine.warmed()

    def ended(self, number: int) -> bool:
        """Record the end of a call that warms an engine up; whether it is one."""
        future = self.open.get(number)
        if future is not None and not future.done():
            future.set_result(None)
        return future is not None
