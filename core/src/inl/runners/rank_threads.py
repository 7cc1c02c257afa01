"""One thread per rank, which an exception in the calling thread cannot block.

Standard executors and futures wait on locks that Ctrl-C may leave locked. Here the
caller only uses queues and locks that are single instructions.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

POLL_SECONDS = 1.0


class Round:
    """A call on all ranks. ``call`` must not raise."""

    def __init__(self, call: Callable[[int], Any], ranks: int) -> None:
        self.call = call
        self.results: dict[int, Any] = {}
        """Results by rank, of the ranks that have returned."""
        self._ranks = range(ranks)
        self._gate = Lock()
        self._gate.acquire()

    def run(self, rank: int) -> None:
        """Call on one rank's thread, unless that was done already."""
        if rank in self.results:
            return
        self.results[rank] = self.call(rank)
        try:
            self._gate.release()
        except RuntimeError:
            """Released before, and the caller has not looked yet."""

    def wait(
        self,
        seconds: float = float("inf"),
        enough: Callable[[Any], bool] = lambda _: False,
        ranks: range | None = None,
    ) -> None:
        """Wait for ranks, for ``seconds``, or for a result that is ``enough``.

        ranks: all by default.
        """
        end = time.monotonic() + seconds
        awaited = self._ranks if ranks is None else ranks
        while any(rank not in self.results for rank in awaited):
            left = end - time.monotonic()
            if left <= 0 or any(map(enough, list(self.results.values()))):
                return
            self._gate.acquire(timeout=min(left, POLL_SECONDS))


class RankThreads:
    """The threads of all ranks. Each runs the rounds in the order of :meth:`send`."""

    def __init__(self, ranks: int, name: str = "inl-rank") -> None:
        self._queues: list[SimpleQueue[Round | None]] = [
            SimpleQueue() for _ in range(ranks)
        ]
        self._threads = [
            Thread(target=_serve, args=each, name=f"{name}-{each[0]}", daemon=True)
            for each in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _stop, self._queues)

    def __len__(self) -> int:
        return len(self._threads)

    def send(self, call: Round) -> None:
        """Queue a round on every rank; may be repeated if it was interrupted."""
        for queue in self._queues:
            queue.put(call)

    def join(self) -> None:
        """Wait until all rounds are done, and end the threads."""
        _stop(self._queues)
        for thread in self._threads:
            thread.join()


def _serve(rank: int, queue: SimpleQueue[Round | None]) -> None:
    while (call := queue.get()) is not None:
        call.run(rank)
        del call  # refers to the runner, which may be collected meanwhile


def _stop(queues: list[SimpleQueue[Round | None]]) -> None:
    for queue in queues:
        queue.put(None)
