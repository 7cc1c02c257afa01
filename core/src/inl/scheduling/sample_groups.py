"""Requests with one prompt, of which only the first computes it."""

from __future__ import annotations

from inl.scheduling.request import Request, Status
from inl.scheduling.waiting_queue import WaitingQueue


class SampleGroups:
    """Holds the requests of a group back until one of them has computed the prompt.

    They are queued when its blocks are published, and share them. Blocks are only
    shared if they are full: the last tokens of the prompt are computed again, into a
    block of their own, so that nothing is ever written to a shared block.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._sources: dict[int, Request] = {}
        """The request of each group that computes the prompt."""
        self._held: dict[int, list[Request]] = {}

    def clear(self) -> None:
        """Forget all groups; the caller queues their requests."""
        self._sources.clear()
        self._held.clear()

    def hold(self, request: Request) -> bool:
        """Hold a new request back if another one computes its prompt."""
        group = request.sample_group
        if not group:
            return False
        source = self._sources.setdefault(group, request)
        if source is request or source.output_ids:
            return False
        self._held.setdefault(group, []).append(request)
        self._waiting.hold(request)
        return True

    def release(self, request: Request) -> None:
        """Queue the group of a request whose prompt is collected."""
        for each in self._held.pop(request.sample_group, ()):
            if each.status is Status.WAITING:
                self._waiting.push_held(each)

    def finish(self, request: Request) -> None:
        """Let another request of the group compute the prompt."""
        group = request.sample_group
        if self._sources.get(group) is not request:
            return
        del self._sources[group]
        held = [
            each for each in self._held.pop(group, ()) if each.status is Status.WAITING
        ]
        if held:
            self._sources[group], *others = held
            self._waiting.push_held(held[0])
            if others:
                self._held[group] = others
