"""Many engines, as one front-end sees them: routes calls, and continues lost ones."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from inl.fleet.calls import Call, Group, Part
from inl.fleet.engine_link import EngineLink, State
from inl.fleet.plugin_router import ReplicaLoad, RoutedPrompt
from inl.fleet.prefix_index import BLOCK_TOKENS
from inl.fleet.router import Router
from inl.serve.admission import Admission, Ticket
from inl.serve.api_error import ApiError
from inl.serve.frontends.forwarding import answer
from inl.serve.frontends.messages import (
    Answered,
    End,
    Forward,
    Forwarded,
    Leave,
    Message,
    News,
    ReadResponse,
    Recall,
    Recalled,
    Replica,
    Scores,
    Stop,
    StoredResponse,
    StoreResponse,
    Submit,
)
from inl.serve.frontends.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from starlette.types import ASGIApp

    from inl.fleet.plugin_router import GuardedPolicy
    from inl.serve.frontends.messages import ToEngine
    from inl.serve.openai.response_store import ResponseStore
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")

START_SECONDS = 5.0
"""Time that a new call waits for an engine, if none is ready."""

CONTINUE_SECONDS = 60.0
"""Time that a call waits for another engine after it has lost one."""

RETRY_SECONDS = 0.1
"""Time between two attempts to continue a call that all engines have refused."""

WARM_PROMPTS = 8
"""Recent prompts that an engine computes before it gets requests."""

WARM_TOKENS = 4096
"""Tokens of each, at most."""

WARM_SECONDS = 30.0
"""Time after which it gets requests in any case."""

MOST_MOVES = 4
"""Moves of a completion without a new token: it may be what ends engines."""

SLOW_SECONDS = 0.5
"""Time between two looks for slow engines."""

TEMPORARY = ("queue_full", "draining", "asleep", "model_load_failed", "process_failed")
"""Codes of refusals after which another engine is asked."""


class EngineGoneError(Exception):
    """The engine of a call answers no more."""


class FleetClient:
    """Sends calls to engines. Used by the event loop only.

    app: answers the paths of ``own``, and those that begin with one of ``own_under``;
    engines answer the others. responses: stored ones, if there are any. policy: chooses
    engines in place of the router.
    """

    def __init__(
        self,
        config: ServerConfig,
        responses: ResponseStore | None = None,
        policy: GuardedPolicy | None = None,
    ) -> None:
        self.engines: list[EngineLink] = []
        self.router = Router()
        self._policy = policy
        self.described: Replica | None = None
        """The first engine that was used; others have the same identity."""
        self.admission = Admission(
            max_running=0,
            max_queue=config.max_queue,
            max_queued_tokens=config.max_queued_tokens,
            max_per_client=config.max_per_key,
        )
        self.outputs = Outputs()
        self._identity = ""
        self.names: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        """Totals: "lost", "refused", "continued", "resumed", "diverged", "failed"."""
        self.continue_seconds: list[float] = []
        """Newest times from noticing the loss of an engine to the next token."""
        self.app: ASGIApp | None = None
        self.own: Collection[str] = ()
        self.own_under: tuple[str, ...] = ()
        self._responses = responses
        self._recent: deque[Submit] = deque(maxlen=WARM_PROMPTS)
        """Newest calls, each of another prompt, that warm engines up."""
        self._warming: dict[int, asyncio.Future[None]] = {}
        """Done once such a call has ended on an engine, by its number."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Replaced by another one whenever an engine becomes ready."""
        self._by_number: dict[int, EngineLink] = {}
        """Engines that are connected."""
        self._calls: dict[int, Call] = {}
        self._parts: dict[int, Part] = {}
        """By their numbers on links."""
        self._groups: dict[int, Group] = {}
        """By the numbers of their first parts."""
        self._asked: dict[int, tuple[EngineLink, asyncio.Future[Any]]] = {}
        """Questions to engines that are no calls, by number."""
        self._next = 0
        self._engine_numbers = 0

    @property
    def identity(self) -> str:
        """Digest of what decides which tokens follow a prompt, once it is known."""
        if self._identity == "" and self.described is not None:
            fields = str(sorted(self.described.identity.items()))
            self._identity = hashlib.sha256(fields.encode()).hexdigest()[:32]
        return self._identity

    async def until_changed(self) -> None:
        """Wait until an engine becomes ready, or one is lost."""
        await self._changed.wait()

    def engine_loads(self) -> list[dict[str, Any]]:
        """Return what is known of each engine, for people and dashboards."""
        loads = []
        for engine in self.engines:
            load = self.router.loads.get(engine.number)
            loads.append(
                {
                    "address": engine.address,
                    "state": engine.state.value,
                    "reason": engine.reason,
                    "device": engine.device,
                    "clock_seconds": engine.clock_seconds,
                    "open": 0 if load is None else load.open,
                    "places": 0 if load is None else load.places,
                    "queued_tokens": 0 if load is None else load.queued_tokens,
                    "seconds_per_token": 0 if load is None else load.seconds_per_token,
                    "slowness": 1.0 if load is None else load.slowness,
                }
            )
        return loads

    async def watch(self) -> None:
        """Look for slow engines until it is cancelled."""
        while True:
            await asyncio.sleep(SLOW_SECONDS)
            for number in self.router.notice_slow():
                engine, load = self._by_number[number], self.router.loads[number]
                if load.slowness == 1:
                    log.info("engine %s: is as fast as others again", engine.address)
                    continue
                log.warning(
                    "engine %s: is slow, its 90th percentile is %.1f times the usual "
                    "one; it gets less", engine.address, load.slowness,
                )  # fmt: skip

    def numbers(self, count: int) -> int:
        """Return the first of ``count`` numbers that nothing else has."""
        first, self._next = self._next, self._next + count
        return first

    async def check_room(self, client: str) -> None:
        """Raise :class:`ApiError` 429 or 503 if a call would not be admitted."""
        self.admission.check(client)

    def send(self, message: ToEngine) -> None:
        """Apply a message of the front-end about one of its calls."""
        if isinstance(message, Leave):
            call = self._calls.get(message.first)
            if call is not None:
                self._leave(call, finished=message.finished)
        elif isinstance(message, Stop):
            call = self._calls.get(message.first)
            part = None if call is None else call.parts[message.index]
            if part is not None and part.group is not None:
                group = part.group
                group.engine.send(Stop(group.first, group.parts.index(part)))

    async def call(self, number: int, message: ToEngine) -> Any:
        """Do what a message asks for; raises :class:`ApiError`."""
        if isinstance(message, Submit):
            await self._submit(message)
            return None
        if isinstance(message, Forward):
            return await self._forward(message)
        if isinstance(message, Recall):
            return await self._recall(number, message)
        store = self._responses
        assert store is not None, "the front-end knows whether there is one"
        if isinstance(message, ReadResponse):
            data = await store.get(message.client, message.name)
            return StoredResponse(number, data)
        assert isinstance(message, StoreResponse), "nothing else is called"
        await store.put(message.client, message.name, message.data)
        return None

    async def _submit(self, message: Submit) -> None:
        """Admit a call and wait until an engine has; raises :class:`ApiError`."""
        count = len(message.prompts) * message.count
        call = Call(message, Ticket(message.client, count))
        self.admission.enter(call.ticket)
        self._calls[message.first] = call
        try:
            tokens = sum(map(len, message.prompts)) * message.count
            self.admission.charge(call.ticket, tokens)
            for position in range(count):
                handle = self.outputs.handle(message.first + position)
                call.parts.append(Part(call, position, handle))
            self._remember(message)
            if any(part.handle.token_ids for part in call.parts):
                self._resume(call)
            else:
                await self._start(call)
        except BaseException:
            self._leave(call, finished=False)
            raise

    def _choose(
        self, call: Call, prompt: int, output_tokens: int, refused: Collection[int]
    ) -> tuple[int, int] | None:
        """Return an engine for a prompt of a call, as :meth:`Router.choose` does."""
        keys, given = call.keys[prompt], call.submit
        tokens = given.prompts[prompt]
        if self._policy is not None:
            chosen = self._policy.choose(
                RoutedPrompt(
                    tokens=tokens, output_tokens=output_tokens, client=given.client,
                    model=given.model,
                ),
                [
                    self._load(*each, len(tokens))
                    for each in self.router.usable(keys, refused).items()
                ],
            )  # fmt: skip
            if chosen is not None:
                return chosen.number, chosen.cached_tokens
        return self.router.choose(keys, len(tokens) + output_tokens, refused)

    def _load(self, number: int, blocks: int, tokens: int) -> ReplicaLoad:
        engine, load = self._by_number[number], self.router.loads[number]
        return ReplicaLoad(
            number=number,
            address=engine.address,
            device=engine.device,
            places=load.places,
            open=load.open,
            queued_tokens=load.queued_tokens,
            cached_tokens=min(blocks * BLOCK_TOKENS, max(tokens - 1, 0)),
            seconds_per_token=load.seconds_per_token,
        )

    def _remember(self, message: Submit) -> None:
        """Keep a prompt to warm engines up, unless one begins as it does."""
        if message.options.get("images"):
            return
        start = message.prompts[0][:BLOCK_TOKENS]
        for each in self._recent:
            if each.prompts[0][:BLOCK_TOKENS] == start:
                return
        self._recent.append(message)

    async def _start(self, call: Call) -> None:
        refused: set[int] = set()
        refusal: ApiError | None = None
        end = time.monotonic() + START_SECONDS
        while True:
            choice = self._choose(call, 0, 0, refused)
            if choice is None:
                if refusal is not None:
                    raise refusal
                await self._wait_for_engine(end)
                continue
            engine = self._by_number[choice[0]]
            group = self._group(call, engine, call.parts, choice[1])
            engine.send(call.message(group.first, _seconds_left(call)))
            try:
                await group.answered
            except EngineGoneError:
                continue
            except ApiError as error:
                self._end_group(group, finished=False)
                if error.code not in TEMPORARY:
                    raise
                refused.add(engine.number)
                refusal = error
                continue
            return

    def _resume(self, call: Call) -> None:
        """Begin to continue completions whose first tokens are known."""
        self.counts["resumed"] += 1
        for part in call.parts:
            if part.handle.completed:
                self._ended(part)
            else:
                self._continue_later(part)

    async def _wait_for_engine(self, end: float) -> None:
        """Wait until another engine is ready; raises :class:`ApiError` 503."""
        changed = self._changed
        try:
            async with asyncio.timeout(max(end - time.monotonic(), 0)):
                await changed.wait()
        except TimeoutError:
            raise ApiError(
                503,
                f"no engine is ready: {self.problem()}; try again later",
                code="no_engine",
                retry_after=1,
            ) from None

    def _group(
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
                self.router.begin(engine.number, call.keys[prompt], tokens, known)
            )
        answered = asyncio.get_running_loop().create_future()
        group = Group(engine, first, parts, assignments, answered)
        call.groups.add(group)
        self._groups[first] = group
        for number, part in enumerate(parts, first):
            self._parts[number] = part
            part.group = group
            part.handle.engine = engine.name
        return group

    def _end_group(self, group: Group, *, finished: bool) -> None:
        """Leave an engine's call. Leaving it twice is allowed."""
        if self._groups.pop(group.first, None) is None:
            return
        for number, part in enumerate(group.parts, group.first):
            self._parts.pop(number, None)
            if part.group is group:
                part.group = None
            part.call.groups.discard(group)
        for assignment in group.assignments:
            self.router.end(assignment)
        group.engine.send(Leave(group.first, finished))

    def _leave(self, call: Call, *, finished: bool) -> None:
        self._calls.pop(call.submit.first, None)
        for task in call.tasks:
            task.cancel()
        for group in list(call.groups):
            self._end_group(group, finished=finished)
        self.admission.leave(call.ticket, finished=finished)

    # Engines: what their links call.

    def opened(self, engine: EngineLink, described: Replica) -> str:
        """Use an engine; returns why it cannot be used, or nothing."""
        first = self.described
        if first is None:
            self.described = described
            (model,) = described.models
            self.names = dict.fromkeys((model.name, *model.adapters), 0)
        elif reason := _difference(first.identity, described.identity):
            return f"has other weights or options than the fleet: {reason}"
        self._engine_numbers += 1
        engine.number = self._engine_numbers
        self._by_number[engine.number] = engine
        engine.is_warming = bool(self._recent) and self._has_other(engine)
        if engine.is_warming:
            task = asyncio.create_task(self._warm(engine, list(self._recent)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        places = described.places
        engine.places = places
        self.router.add(engine.number, places, described.cache_tokens)
        self.admission.max_running += places
        self._announce()
        return ""

    async def _warm(self, engine: EngineLink, calls: Sequence[Submit]) -> None:
        """Let an engine compute recent prompts, and then give it requests."""
        loop, ends = asyncio.get_running_loop(), []
        await asyncio.sleep(0)  # it is opened first
        for call in calls:
            number = self.numbers(1)
            future = self._warming[number] = loop.create_future()
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
            numbers = [n for n, future in self._warming.items() if future in ends]
            for number in numbers:
                del self._warming[number]
                engine.send(Leave(number, finished=True))
            log.info(
                "engine %s: has computed %d of %d recent prompts in %.1f s",
                engine.address, done, len(ends), time.monotonic() - began,
            )  # fmt: skip
            engine.warmed()

    def _warmed(self, number: int) -> bool:
        """Record the end of a call that warms an engine up; whether it is one."""
        future = self._warming.get(number)
        if future is not None and not future.done():
            future.set_result(None)
        return future is not None

    def refused(self, engine: EngineLink) -> None:  # noqa: ARG002 - its log has it
        """Record that an engine is not used."""
        self.counts["refused"] += 1

    def changed(self, engine: EngineLink) -> None:
        """React to another state of an engine that is connected."""
        is_ready = engine.state is State.READY
        if engine.number in self._by_number:
            self.router.set_usable(engine.number, is_ready)
        if is_ready:
            self._announce()
            for each in self.engines:
                if each.state is State.SILENT:
                    self._abandon(each)  # it had to wait for another one
        elif engine.state is State.SILENT and self._has_other(engine):
            self.counts["lost"] += 1
            self._abandon(engine)
        else:
            self._hurry()

    def lost(self, engine: EngineLink) -> None:
        """Leave an engine whose link has ended."""
        self.counts["lost"] += not engine.is_draining
        del self._by_number[engine.number]
        self._abandon(engine)
        self.router.remove(engine.number)
        self.admission.max_running -= engine.places
        self._hurry()
        self._announce()

    def _hurry(self) -> None:
        """Give requests to engines that are not warm yet if no other one is left."""
        if self.problem() is not None:
            for engine in self.engines:
                engine.warmed()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _has_other(self, engine: EngineLink) -> bool:
        return any(
            each is not engine and each.state is State.READY for each in self.engines
        )

    def _abandon(self, engine: EngineLink) -> None:
        """Continue all that an engine has not finished elsewhere."""
        now = time.monotonic()
        for group in [each for each in self._groups.values() if each.engine is engine]:
            self._end_group(group, finished=False)
            if not group.answered.done():
                group.answered.set_exception(EngineGoneError())
                continue
            for part in group.parts:
                self._move(part, now)
        for number, (used, future) in list(self._asked.items()):
            if used is engine and not future.done():
                del self._asked[number]
                future.set_exception(EngineGoneError())

    def problem(self) -> str | None:
        """Return why no engine is ready; ``None`` if one is."""
        if any(each.state is State.READY for each in self.engines):
            return None
        return "; ".join(f"{each.address} {each.reason}" for each in self.engines)

    # Outputs.

    def received(self, engine: EngineLink, message: Message) -> None:
        """Apply a message of an engine about a request."""
        if isinstance(message, News):
            self._apply(message)
        elif isinstance(message, Answered):
            if message.failure is not None and self._warmed(message.number):
                return
            group = self._groups.get(message.number)
            if group is None or group.answered.done():
                return
            if message.failure is None:
                group.answered.set_result(None)
            else:
                group.answered.set_exception(message.failure.error())
        elif isinstance(message, Forwarded | Recalled):
            waiting = self._asked.pop(message.number, None)
            if waiting is not None and not waiting[1].done():
                waiting[1].set_result(message)
        else:
            log.warning("engine %s: sent %s", engine.address, type(message).__name__)

    def _apply(self, news: News) -> None:
        """Apply outputs, by the numbers of the front-end; unknown ones are left out."""
        translated = News([], [], [], [], [])
        again: set[int] = set()
        """Numbers whose first token was generated before."""
        for number, cached in news.cached:
            self._began(number, cached, translated)
        for number, tokens in zip(news.numbers, news.tokens, strict=True):
            part = self._parts.get(number)
            if part is None:
                continue
            if part.expected is not None:
                again.add(number)
                if not self._is_expected(part, tokens):
                    continue
                tokens = tokens[1:]
            if tokens:
                part.moves = 0
                translated.numbers.append(part.number)
                translated.tokens.append(tokens)
        for scores in news.scores:
            if (part := self._parts.get(scores.number)) is not None:
                logprobs = scores.logprobs[scores.number in again :]
                translated.scores.append(Scores(part.number, logprobs))
        ended = []
        for end in news.ends:
            part = self._parts.get(end.number)
            if part is None:
                self._warmed(end.number)
                continue
            if end.failure is not None and end.failure.status >= 500:
                self._failed(part, end)
                continue
            ended.append(part)
            end.number = part.number
            translated.ends.append(end)
        self.outputs.apply(translated)
        for part in ended:
            self._ended(part)

    def _began(self, number: int, cached: int, translated: News) -> None:
        """Record the first token of a completion at its engine."""
        part = self._parts.get(number)
        if part is None or part.group is None:
            return
        call, group = part.call, part.group
        self.admission.begun(call.ticket)
        self.router.record_first(group.assignments[number - group.first], cached)
        if part.moved_at:
            self.continue_seconds.append(time.monotonic() - part.moved_at)
            del self.continue_seconds[:-1000]
            part.moved_at = 0.0
        if not part.handle.token_ids:
            translated.cached.append((part.number, cached))

    def _is_expected(self, part: Part, tokens: Sequence[int]) -> bool:
        """Whether an engine continues an output with its last token; else go on."""
        expected, part.expected = part.expected, None
        if tokens[0] == expected:
            return True
        self.counts["diverged"] += 1
        log.warning(
            "a request was continued on %s, which has token %d at place %d where the "
            "engine before had %s; it goes on after that",
            part.group and part.group.engine.device, tokens[0],
            len(part.handle.token_ids) - 1, expected,
        )  # fmt: skip
        if part.group is not None:
            self._end_group(part.group, finished=False)
        self._move(part, time.monotonic(), verifies=False)
        return False

    def _ended(self, part: Part) -> None:
        """Free what a completion has used, once its group or call has ended."""
        group, call = part.group, part.call
        if group is not None and all(each.handle.completed for each in group.parts):
            self._end_group(group, finished=True)
        if all(each.handle.completed for each in call.parts):
            self.admission.computed(call.ticket, finished=True)

    def _failed(self, part: Part, end: End) -> None:
        """Continue a completion that its engine could not."""
        assert end.failure is not None, "checked by the caller"
        log.warning("a request failed on an engine: %.200s", end.failure.message)
        group = part.group
        if group is not None and len(group.parts) == 1:
            self._end_group(group, finished=False)
        elif group is not None:
            self._parts.pop(group.first + list(group.parts).index(part))
        self._move(
            part, time.monotonic(), avoided=None if group is None else group.engine
        )

    # Continuing.

    def _move(
        self,
        part: Part,
        now: float,
        *,
        verifies: bool = True,
        avoided: EngineLink | None = None,
    ) -> None:
        """Begin to continue a completion on another engine, unless it has finished.

        verifies: whether the next engine generates the last token again. avoided: an
        engine that failed with it.
        """
        call = part.call
        part.group, part.expected = None, None
        if part.handle.completed or call.submit.first not in self._calls:
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
        """Begin to continue a completion on an engine, as :meth:`_move`."""
        work = self._continue(part, verifies=verifies, avoided=avoided)
        task = asyncio.create_task(work)
        part.call.tasks.add(task)
        task.add_done_callback(part.call.tasks.discard)

    async def _continue(
        self, part: Part, *, verifies: bool, avoided: EngineLink | None
    ) -> None:
        """Submit a completion after its output so far to another engine."""
        call, output = part.call, list(part.handle.token_ids)
        if output and not verifies and self._is_end(call, output[-1]):
            part.handle.finish(End(part.number, "stop", True, None, None))
            self._ended(part)
            return
        expected = output.pop() if output and verifies else None
        prompt = call.prompt_of(part)
        refused = set() if avoided is None else {avoided.number}
        end = time.monotonic() + CONTINUE_SECONDS
        while True:
            choice = self._choose(call, prompt, len(output), refused)
            if choice is None:
                if time.monotonic() > end:
                    self._give_up(part, "no engine could continue it")
                    return
                if refused:
                    await asyncio.sleep(RETRY_SECONDS)
                    refused.clear()
                    continue
                try:
                    await self._wait_for_engine(end)
                except ApiError:
                    self._give_up(part, "no engine could continue it")
                    return
                continue
            engine = self._by_number[choice[0]]
            group = self._group(call, engine, [part], choice[1])
            part.expected = expected
            seconds = _seconds_left(call)
            engine.send(call.continued(part, group.first, output, seconds))
            try:
                await group.answered
            except EngineGoneError:
                continue
            except ApiError as error:
                self._end_group(group, finished=False)
                if error.code not in TEMPORARY and error.status < 500:
                    part.handle.fail(error)
                    self._ended(part)
                    return
                refused.add(engine.number)
                continue
            except asyncio.CancelledError:
                self._end_group(group, finished=False)
                raise
            self.counts["continued"] += part.moves > 0
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
        described = self.described
        assert described is not None, "an engine has generated it"
        return token in described.end_ids and not options.get("ignore_eos")

    def _give_up(self, part: Part, reason: str) -> None:
        self.counts["failed"] += 1
        error = ApiError(503, f"the engine was lost: {reason}", code="engine_lost")
        part.handle.fail(error)
        self._ended(part)

    # Requests that are not generated.

    async def _forward(self, message: Forward) -> Forwarded:
        """Answer a request here, or by an engine; raises :class:`ApiError`."""
        if message.path in self.own or message.path.startswith(self.own_under):
            assert self.app is not None, "set before requests are accepted"
            return await answer(self.app, message)
        end = time.monotonic() + START_SECONDS
        while True:
            choice = self.router.choose([], 1)
            if choice is None:
                await self._wait_for_engine(end)
                continue
            engine = self._by_number[choice[0]]
            try:
                answered: Forwarded = await self._ask(engine, message)
            except EngineGoneError:
                continue
            return answered

    async def _recall(self, number: int, message: Recall) -> Recalled:
        """Ask an engine for outputs; it remembers none if it is lost."""
        for engine in self._by_number.values():
            if engine.name == message.engine and engine.state is State.READY:
                with suppress(EngineGoneError):
                    recalled: Recalled = await self._ask(engine, message)
                    return recalled
        return Recalled(number, [[]] * message.count, [0] * message.count)

    async def _ask(self, engine: EngineLink, message: Forward | Recall) -> Any:
        """Return an engine's answer; raises :class:`EngineGoneError`."""
        number = message.number = self.numbers(1)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = engine, future
        engine.send(message)
        try:
            return await future
        finally:
            self._asked.pop(number, None)


def _seconds_left(call: Call) -> float | None:
    """Return the seconds until the deadline of a call, which has one on this clock."""
    deadline = call.submit.options.get("deadline")
    return None if deadline is None else max(deadline - time.time(), 0.001)


def _difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return what differs between two engines; empty if nothing does."""
    return "; ".join(
        f"{name}: {theirs.get(name, 'none'):.80}, the fleet's: "
        f"{ours.get(name, 'none'):.80}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
