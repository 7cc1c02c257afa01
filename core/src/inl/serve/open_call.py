"""A call of a model: its admission, its completions, and how it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from inl.serve.admission import Ticket
from inl.serve.generations import Generations

if TYPE_CHECKING:
    import asyncio

    from inl.engine.request_handle import RequestHandle
    from inl.serve.admission import Admission
    from inl.serve.generations import Generation
    from inl.serve.job import Job
    from inl.serve.metrics import ModelMetrics
    from inl.serve.token_texts import TokenTexts


@final
class OpenCall(Ticket, Generations):
    """A job that is admitted and has not finished. Used by the event loop only."""

    def __init__(
        self, job: Job, client: str, admission: Admission, metrics: ModelMetrics
    ) -> None:
        Ticket.__init__(self, client, job.completions)
        Generations.__init__(self)
        self.job = job
        self._admission, self._metrics = admission, metrics
        self._cancel: Callable[[RequestHandle], None] | None = None
        self._is_aborted = False

    def charge(self, tokens: int) -> None:
        """Count the prompt tokens; raises :class:`ApiError` 503."""
        self._admission.charge(self, tokens)

    def run(
        self,
        items: list[Generation],
        token_text: TokenTexts,
        cancel: Callable[[RequestHandle], None],
    ) -> None:
        """Set the completions, once the model is loaded.

        cancel: ends the request of a handle.
        """
        self._cancel = cancel
        self.start(items, token_text)
        if self._is_aborted:
            self.abort()
        self.free_places()

    def free_places(self) -> None:
        """Free the places of the call if all of its completions have finished.

        A client that reads slowly holds none of them.
        """
        if not self.has_places or not self.items:
            return
        is_aborted = False
        for item in self.items:
            reason = item.handle.finish_reason
            if reason is None:
                return
            is_aborted |= reason in ("cancelled", "error")
        self._admission.computed(self, finished=not is_aborted)

    def begin(self) -> None:
        """Record that a completion has produced a token."""
        self._admission.begun(self)

    def record(self, item: Generation, count: int) -> None:
        """Record ``count`` new tokens of a completion."""
        self.begin()
        is_first = item.polled_tokens == count
        firsts = [item.handle.first_token_seconds] if is_first else []
        self._metrics.record_tokens([item.handle.request.id], [count], firsts)

    def cancel(self, item: Generation) -> None:
        """End the request of a completion."""
        assert self._cancel is not None, "set with the completions"
        self._cancel(item.handle)

    def abort(self) -> None:
        """End what has not finished with an error: now, or once the model is loaded."""
        self._is_aborted = True
        for item in self._open.values():
            self.cancel(item)

    def end(self) -> None:
        """Cancel what has not finished, and record the end of all completions."""
        self.close()
        for item in self.items:
            if not item.handle.completed:
                self.cancel(item)
        for item in self.items:
            self._metrics.record_end(item)


class Waiter:
    """What the handles of a call wake. They have no reference to the call."""

    __slots__ = ("_call", "_event")

    def __init__(self, call: OpenCall) -> None:
        self._event: asyncio.Event = call.event
        self._call = weakref.ref(call)

    def set(self) -> None:
        """Wake what reads the completions, after an event of one of them."""
        self._event.set()
        if (call := self._call()) is not None:
            call.free_places()
