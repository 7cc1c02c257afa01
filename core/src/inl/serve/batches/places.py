"""Places of requests that the batches of several keys share."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """A number of places, each given to the key that holds the fewest.

    Of keys that hold equally many, the one that has waited longest since its last place
    is first. For one event loop.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """What waits for a place, by key; the key that got one last is the last."""

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Hold a place in the body."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._give()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # what still waits is passed over
                self._held[owner] -= 1
                self._free += 1
                self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            owner = min(self._waiting, key=self._held.__getitem__)
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                self._held[owner] += 1
                self._free -= 1
