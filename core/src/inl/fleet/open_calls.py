"""The open calls of a front-end: which engine computes which of their completions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inl.fleet.calls import Call, Group, Part
from inl.serve.admission import Admission, Ticket
from inl.serve.frontends.messages import Leave, Submit
from inl.serve.frontends.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inl.fleet.engine_link import EngineLink
    from inl.fleet.router import Router
    from inl.serve.settings import ServerConfig


class OpenCalls:
    """Calls, and the groups of their completions that engines have got.

    adapters: digests of all that engines have, by name.
    """

    def __init__(
        self, config: ServerConfig, router: Router, adapters: Mapping[str, str]
    ) -> None:
        self._router, self._adapters = router, adapters
        self.admission = Admission(
            max_running=0,
            max_queue=config.max_queue,
            max_queued_tokens=config.max_queued_tokens,
            max_per_client=config.max_per_key,
        )
        self.outputs = Outputs()
        self.by_number: dict[int, Call] = {}
        """By the numbers of their first completions."""
        self.parts: dict[int, Part] = {}
        """By their numbers on links."""
        self.groups: dict[int, Group] = {}
        """By the numbers of their first parts."""
        self._next = 0

    def numbers(self, count: int) -> int:
        """Return the first of ``count`` numbers that nothing else has."""
        first, self._next = self._next, self._next + count
        return first

    def open(self, message: Submit) -> Call:
        """Admit a call; raises :class:`~inl.serve.api_error.ApiError`."""
        count = len(message.prompts) * message.count
        adapter = message.model if message.model in self._adapters else None
        digest = self._adapters[adapter] if adapter else ""
        call = Call(message, Ticket(message.client, count), adapter or "", digest)
        self.admission.enter(call.ticket)
        self.by_number[message.first] = call
        try:
            tokens = sum(map(len, message.prompts)) * message.count
            self.admission.charge(call.ticket, tokens)
            for position in range(count):
                handle = self.outputs.handle(message.first + position)
                call.parts.append(Part(call, position, handle))
        except BaseException:
            self.leave(call, finished=False)
            raise
        return call

    def leave(self, call: Call, *, finished: bool) -> None:
        """Forget a call; engines stop what they have not finished of it."""
        self.by_number.pop(call.submit.first, None)
        for task in call.tasks:
            task.cancel()
        for group in list(call.groups):
            self.end(group, finished=finished)
        self.admission.leave(call.ticket, finished=finished)

    def begin(
        self, call: Call, engine: EngineLink, parts: Sequence[Part], cached: int
    ) -> Group:
        """Assign completions to an engine."""
        first = self.numbers(len(parts))
        assignments = []
        for part in parts:
            prompt = call.prompt_of(part)
            tokens = len(call.submit.prompts[prompt]) + len(part.handle.token_ids)
            # The samples of a prompt share its blocks.
            is_first = part.position % call.submit.count == 0 or len(parts) == 1
            known = (cached if not prompt else 0) if is_first else tokens
            assignments.append(
                self._router.begin(engine.number, call.keys[prompt], tokens, known)
            )
        answered = asyncio.get_running_loop().create_future()
        group = Group(engine, first, parts, assignments, answered)
        call.groups.add(group)
        self.groups[first] = group
        for number, part in enumerate(parts, first):
            self.parts[number] = part
            part.group = group
            part.handle.engine = engine.name
        return group

    def end(self, group: Group, *, finished: bool) -> None:
        """Leave an engine's call. Leaving it twice is allowed."""
        if self.groups.pop(group.first, None) is None:
            return
        for number, part in enumerate(group.parts, group.first):
            self.parts.pop(number, None)
            if part.group is group:
                part.group = None
            part.call.groups.discard(group)
        for assignment in group.assignments:
            self._router.end(assignment)
        leave = Leave(group.first, finished)
        if finished:
            group.engine.leave(leave)
        else:
            group.engine.send(leave)

    def ended(self, part: Part) -> None:
        """Free what a completion has used, once its group or call has ended."""
        group, call = part.group, part.call
        if group is not None and all(each.handle.completed for each in group.parts):
            self.end(group, finished=True)
        if all(each.handle.completed for each in call.parts):
            self.admission.computed(call.ticket, finished=True)
