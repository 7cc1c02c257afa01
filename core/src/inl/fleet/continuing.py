"""Continues completions whose engine was lost, or that began at another server."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from inl.serve.api_error import ApiError
from inl.serve.frontends.messages import End, Export, Exported
from inl.workers.settings import parse_address, show_address

if TYPE_CHECKING:
    from collections import Counter

    from inl.fleet.calls import Call, Part
    from inl.fleet.engine_link import EngineLink
    from inl.fleet.members import Members
    from inl.fleet.open_calls import OpenCalls

log = logging.getLogger("inl.serve")

CONTINUE_SECONDS = 60.0
"""Time that a call waits for another engine after it has lost one."""

RETRY_SECONDS = 0.1
"""Time between two attempts to continue a call that all engines have refused."""

MOST_MOVES = 4
"""Moves of a completion without a new token: it may be what ends engines."""

TEMPORARY = ("queue_full", "draining", "asleep", "model_load_failed", "process_failed")
"""Codes of refusals after which another engine is asked."""


class EngineGoneError(Exception):
    """The engine of a call answers no more."""


class Continuing:
    """Submits completions after their outputs so far. counts: totals to add to."""

    def __init__(
        self, members: Members, calls: OpenCalls, counts: Counter[str]
    ) -> None:
        self._members, self._calls, self._counts = members, calls, counts

    def resume(self, call: Call) -> None:
        """Begin to continue completions whose first tokens are known."""
        self._counts["resumed"] += 1
        for part in call.parts:
            if part.handle.completed:
                self._calls.ended(part)
            else:
                self._continue_later(part)

    def abandon(self, engine: EngineLink) -> None:
        """Continue all that an engine has not finished elsewhere."""
        now = time.monotonic()
        groups = self._calls.groups.values()
        for group in [each for each in groups if each.engine is engine]:
            # Others of the group may have gone on elsewhere.
            parts = [part for part in group.parts if part.group is group]
            self._calls.end(group, finished=False)
            if not group.answered.done():
                group.answered.set_exception(EngineGoneError())
                continue
            for part in parts:
                self.move(part, now)

    def export(self, engine: EngineLink) -> None:
        """Ask an engine to end what it has not finished, and what it holds of that."""
        for number, part in list(self._calls.parts.items()):
            group = part.group
            if group is not None and group.engine is engine and group.answered.done():
                engine.send(Export(number))

    def exported(self, engine: EngineLink, message: Exported) -> None:
        """Continue a completion that an engine has ended for another one."""
        part = self._calls.parts.get(message.number)
        if part is None or (group := part.group) is None or group.engine is not engine:
            return
        del self._calls.parts[message.number]
        part.group = None
        if not any(each.group is group for each in group.parts):
            self._calls.end(group, finished=False)
        state = None
        if message.ticket:
            host, _ = parse_address(engine.address)
            state = show_address(host, message.port), message.ticket
            self._counts["exported"] += 1
        self.move(part, time.monotonic(), verifies=state is None, state=state)

    def move(
        self,
        part: Part,
        now: float,
        *,
        verifies: bool = True,
        avoided: EngineLink | None = None,
        state: tuple[str, str] | None = None,
    ) -> None:
        """Begin to continue a completion on another engine, unless it has finished.

        verifies: whether the next engine generates the last token again. avoided: an
        engine that failed with it. state: address and ticket of what the one before
        holds of it.
        """
        call = part.call
        part.group, part.expected, part.state = None, None, state
        if part.handle.completed or call.submit.first not in self._calls.by_number:
            return
        part.moves += 1
        part.moved_at = part.moved_at or now
        if part.moves > MOST_MOVES:
            self._give_up(part, "its engines ended several times without a new token")
            return
        self._continue_later(part, verifies=verifies, avoided=avoided)

    def _continue_later(
        self,
        part: Part,
        *,
        verifies: bool = True,
        avoided: EngineLink | None = None,
    ) -> None:
        """Begin to continue a completion on an engine, as :meth:`move`."""
        work = self._continue(part, verifies=verifies, avoided=avoided)
        task = asyncio.create_task(work)
        part.call.tasks.add(task)
        task.add_done_callback(part.call.tasks.discard)

    async def _continue(
        self, part: Part, *, verifies: bool, avoided: EngineLink | None
    ) -> None:
        """Submit a completion after its output so far to another engine."""
        call, output = part.call, list(part.handle.token_ids)
        has_moved = part.moves > 0  # a first token resets it, maybe before the answer
        if output and not verifies and self._is_end(call, output[-1]):
            part.handle.finish(End(part.number, "stop", True, None, None))
            self._calls.ended(part)
            return
        expected = output.pop() if output and verifies else None
        prompt = call.prompt_of(part)
        refused = set() if avoided is None else {avoided.number}
        end = time.monotonic() + CONTINUE_SECONDS
        while True:
            choice = self._members.choose(call, prompt, len(output), refused)
            if choice is None:
                if time.monotonic() > end:
                    self._give_up(part, "no engine could continue it")
                    return
                if refused:
                    await asyncio.sleep(RETRY_SECONDS)
                    refused.clear()
                    continue
                try:
                    await self._members.wait_for_engine(end, call.adapter)
                except ApiError:
                    self._give_up(part, "no engine could continue it")
                    return
                continue
            engine = self._members.by_number[choice[0]]
            group = self._calls.begin(call, engine, [part], choice[1])
            part.expected = expected
            seconds = call.seconds_left()
            engine.send(call.continued(part, group.first, output, seconds))
            try:
                await group.answered
            except EngineGoneError:
                continue
            except ApiError as error:
                self._calls.end(group, finished=False)
                if error.code not in TEMPORARY and error.status < 500:
                    part.handle.fail(error)
                    self._calls.ended(part)
                    return
                refused.add(engine.number)
                continue
            except asyncio.CancelledError:
                self._calls.end(group, finished=False)
                raise
            self._counts["continued"] += has_moved
            log.info(
                "request %s: goes on after %d tokens on engine %s",
                call.submit.request, len(output) + (expected is not None),
                engine.address,
            )  # fmt: skip
            return

    def _is_end(self, call: Call, token: int) -> bool:
        """Whether a token ends the outputs of a call."""
        options = call.submit.options
        if token in options.get("stop_ids", ()):
            return True
        described = self._members.described
        assert described is not None, "an engine has generated it"
        return token in described.end_ids and not options.get("ignore_eos")

    def _give_up(self, part: Part, reason: str) -> None:
        self._counts["failed"] += 1
        error = ApiError(503, f"the engine was lost: {reason}", code="engine_lost")
        part.handle.fail(error)
        self._calls.ended(part)
