"""The requests of one call, queued in order as the waiting queue has room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inl.errors import QueueFull

if TYPE_CHECKING:
    from inl.engine.request_handle import Completion, RequestHandle


class Batch:
    """Handles of one call; :meth:`feed` queues them, :attr:`completed` once all end."""

    def __init__(self) -> None:
        self.handles: list[RequestHandle] = []
        self.firsts: list[RequestHandle] = []
        """The first handle of each prompt."""
        self.last: RequestHandle | None = None
        """The last handle; the batch has not completed before it."""
        self._queued = self._finished = 0
        self._has_begun = False
        """Whether a handle has been queued; it may have been removed since."""

    def add(self, handle: RequestHandle) -> None:
        """Add a handle with its further samples."""
        self.firsts.append(handle)
        self.handles += handle.samples
        self.last = self.handles[-1]

    @property
    def completed(self) -> bool:
        """Whether every request has finished."""
        handles, finished = self.handles, self._finished
        while finished < len(handles) and handles[finished].completed:
            finished += 1
        # Stored once: two threads may step while one takes over from the other.
        self._finished = finished
        return finished == len(handles)

    @property
    def is_fed(self) -> bool:
        """Whether every handle is queued."""
        return self._queued == len(self.handles)

    def feed(self, add: Callable[[RequestHandle], None]) -> None:
        """Queue the next handles, as many as there is room for.

        add: queues a handle; does nothing for one that is queued already. Raises
        :class:`~inl.errors.QueueFull` if there is no room for the first one.
        """
        while (queued := self._queued) < len(self.handles):
            try:
                add(self.handles[queued])
            except QueueFull:
                if not self._has_begun:
                    raise
                return
            self._has_begun = True
            self._queued = queued + 1

    def pop_completions(self) -> list[Completion]:
        """Remove prompts that have finished and return their completions, in order.

        Up to the first prompt of which a request is open or has failed.
        """
        completions, popped = [], 0
        for first in self.firsts:
            stop = popped + len(first.samples)
            failed = any(each.error is not None for each in first.samples)
            if failed or stop > min(self._queued, self._finished):
                break
            completions.append(first.completion())
            popped = stop
        del self.firsts[: len(completions)], self.handles[:popped]
        self._queued -= popped
        self._finished -= popped
        return completions

    def fail(self, error: BaseException) -> None:
        """Finish every request that has not finished with an error."""
        for handle in self.handles:
            handle.fail(error)

    def notify(self) -> None:
        """Call the listener, which all handles of a batch share."""
        if self.handles:
            self.handles[0].notify()
