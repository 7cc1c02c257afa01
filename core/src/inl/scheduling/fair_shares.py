"""Fair shares between keys: the key with the fewest computed tokens comes next.

Virtual token counters (Sheng et al., OSDI 2024), with the start tags of start-time fair
queuing (Goyal et al., 1996): a key that had nothing to do is not credited for it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

MAX_IDLE_KEYS = 4096
"""Keys without waiting requests whose counters are kept, at least."""


class FairShares:
    """Counts the tokens computed for each key, and orders the keys that wait.

    Between two keys that wait all the time, the counters differ by no more than the
    tokens of the requests that one key can run at once.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        """A lower bound of the counter of each waiting key; the key."""
        self._waiting: set[str] = set()
        self._floor = 0
        """Counter that a new key starts with: that of the key chosen last."""

    def __len__(self) -> int:
        return len(self._counters)

    def counter(self, key: str) -> int:
        """Return the tokens computed for a key, above those that it starts with."""
        return self._counters.get(key, self._floor)

    def add(self, key: str) -> None:
        """Let a key take part; does nothing if it waits already."""
        if key in self._waiting:
            return
        if len(self._counters) > 2 * MAX_IDLE_KEYS + len(self._waiting):
            self._forget()
        self._counters[key] = max(self.counter(key), self._floor)
        self._waiting.add(key)
        heappush(self._heap, (self._counters[key], key))

    def first(self) -> str | None:
        """Return the waiting key with the lowest counter, ``None`` without one."""
        while self._heap:
            bound, key = self._heap[0]
            counter = self._counters[key]
            if bound == counter:
                return key
            heapreplace(self._heap, (counter, key))
        return None

    def remove_first(self) -> None:
        """Remove the key that :meth:`first` returned: none of its requests waits."""
        _, key = heappop(self._heap)
        self._waiting.remove(key)

    def choose(self, key: str) -> None:
        """Record that a request of the first key starts."""
        self._floor = max(self._floor, self._counters[key])

    def charge(self, key: str, tokens: int) -> None:
        """Count tokens computed for a key."""
        self._counters[key] = self.counter(key) + tokens

    def clear_waiting(self) -> None:
        """Remove all waiting keys and keep the counters."""
        self._heap.clear()
        self._waiting.clear()

    def _forget(self) -> None:
        """Drop the lowest counters of keys that do not wait."""
        idle = [
            (count, key)
            for key, count in self._counters.items()
            if key not in self._waiting
        ]
        heapify(idle)
        for _ in range(len(idle) - MAX_IDLE_KEYS):
            del self._counters[heappop(idle)[1]]
