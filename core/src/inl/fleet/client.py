"""Many engines, as one front-end sees them: routes calls, and continues lost ones."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from inl.engine.options import NEUTRAL_SAMPLING, with_sampling
from inl.fleet.continuing import TEMPORARY, Continuing, EngineGoneError
from inl.fleet.engine_link import EngineLink, State
from inl.fleet.members import Members
from inl.fleet.news import EngineNews
from inl.fleet.open_calls import OpenCalls
from inl.fleet.prefix_news import PrefixNews
from inl.fleet.questions import START_SECONDS, Questions
from inl.fleet.warming import Warming
from inl.serve.api_error import ApiError
from inl.serve.frontends.messages import (
    Answered,
    Exported,
    Forward,
    Forwarded,
    Leave,
    Message,
    News,
    Prefixes,
    ReadResponse,
    Recall,
    Recalled,
    Replica,
    Stop,
    StoredResponse,
    StoreResponse,
    Submit,
)

if TYPE_CHECKING:
    from inl.fleet.calls import Call
    from inl.fleet.plugin_router import GuardedPolicy
    from inl.serve.frontends.messages import ToEngine
    from inl.serve.openai.response_store import ResponseStore
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")


class FleetClient:
    """Sends calls to engines. Used by the event loop only.

    responses: stored ones, if there are any. policy: chooses engines in place of the
    router.
    """

    def __init__(
        self,
        config: ServerConfig,
        responses: ResponseStore | None = None,
        policy: GuardedPolicy | None = None,
    ) -> None:
        self.members = Members(policy)
        self.engines, self.router = self.members.engines, self.members.router
        self.calls = OpenCalls(config, self.router, self.members.adapters)
        self.admission, self.outputs = self.calls.admission, self.calls.outputs
        self.names: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        """Totals: "lost", "refused", "continued", "resumed", "diverged", "failed",
        "prefix_gaps", and "exported", continued with what the engine before has
        computed."""
        self._responses = responses
        self.warming = Warming(self.numbers)
        self.questions = Questions(self.members, self.numbers)
        self._continuing = Continuing(self.members, self.calls, self.counts)
        self._news = EngineNews(
            self.calls, self.router, self.warming, self._continuing, self.counts
        )
        self._prefixes = PrefixNews(self.router, self.counts)
        self.continue_seconds = self._news.continue_seconds

    def identity_of(self, model: str | None) -> str:
        """Digest of what decides which tokens follow a prompt, once it is known."""
        return self.members.identity_of(model)

    def numbers(self, count: int) -> int:
        """Return the first of ``count`` numbers that nothing else has."""
        return self.calls.numbers(count)

    async def check_room(self, client: str) -> None:
        """Raise :class:`ApiError` 429 or 503 if a call would not be admitted."""
        self.admission.check(client)

    def send(self, message: ToEngine) -> None:
        """Apply a message of the front-end about one of its calls."""
        if isinstance(message, Leave):
            call = self.calls.by_number.get(message.first)
            if call is not None:
                self.calls.leave(call, finished=message.finished)
        elif isinstance(message, Stop):
            call = self.calls.by_number.get(message.first)
            part = None if call is None else call.parts[message.index]
            if part is not None and part.group is not None:
                group = part.group
                group.engine.send(Stop(group.first, group.parts.index(part)))

    async def call(self, number: int, message: ToEngine) -> Any:
        """Do what a message asks for; raises :class:`ApiError`."""
        if isinstance(message, Submit):
            await self._submit(message)
            return Answered(number, sampling=self._sampling(message))
        if isinstance(message, Forward):
            return await self.questions.forward(message)
        if isinstance(message, Recall):
            return await self.questions.recall(number, message)
        store = self._responses
        assert store is not None, "the front-end knows whether there is one"
        if isinstance(message, ReadResponse):
            data = await store.get(message.client, message.name)
            return StoredResponse(number, data)
        assert isinstance(message, StoreResponse), "nothing else is called"
        await store.put(message.client, message.name, message.data)
        return None

    def _sampling(self, message: Submit) -> tuple[float, float] | None:
        """Return temperature and ``top_p`` of a call, as its engines set them."""
        if (described := self.members.described) is None:
            return None
        options = NEUTRAL_SAMPLING | with_sampling(
            message.options, described.sampling_defaults
        )
        return options["temperature"], options["top_p"]

    async def _submit(self, message: Submit) -> None:
        """Admit a call and wait until an engine has; raises :class:`ApiError`."""
        call = self.calls.open(message)
        try:
            self.warming.remember(message)
            if any(part.handle.token_ids for part in call.parts):
                self._continuing.resume(call)
            else:
                await self._start(call)
        except BaseException:
            self.calls.leave(call, finished=False)
            raise

    async def _start(self, call: Call) -> None:
        refused: set[int] = set()
        refusal: ApiError | None = None
        end = time.monotonic() + START_SECONDS
        while True:
            choice = self.members.choose(call, 0, 0, refused)
            if choice is None:
                if refusal is not None:
                    raise refusal
                await self.members.wait_for_engine(end, call.adapter)
                continue
            engine = self.members.by_number[choice[0]]
            group = self.calls.begin(call, engine, call.parts, choice[1])
            engine.send(call.message(group.first, call.seconds_left()))
            try:
                await group.answered
            except EngineGoneError:
                continue
            except ApiError as error:
                self.calls.end(group, finished=False)
                if error.code not in TEMPORARY:
                    raise
                refused.add(engine.number)
                refusal = error
                continue
            return

    # Engines: what their links call.

    def opened(self, engine: EngineLink, described: Replica) -> str:
        """Use an engine; returns why it cannot be used, or nothing."""
        members = self.members
        is_first = members.described is None
        if reason := members.join(engine, described):
            return reason
        if is_first:
            self.names[described.models[0].name] = 0
        self.names |= dict.fromkeys(described.models[0].adapters, 0)
        engine.is_warming = False
        if self.warming.recent and members.has_other(engine):
            self.warming.begin(engine)
        if not engine.is_held:
            self.admission.max_running += engine.places
        members.announce()
        return ""

    def refused(self, engine: EngineLink) -> None:  # noqa: ARG002 - its log has it
        """Record that an engine is not used."""
        self.counts["refused"] += 1

    def changed(self, engine: EngineLink) -> None:
        """React to another state of an engine that is connected."""
        is_ready = engine.state is State.READY
        if engine.number in self.members.by_number:
            self.router.set_usable(engine.number, is_ready)
        if is_ready:
            self.members.announce()
            for each in self.engines:
                if each.state is State.SILENT:
                    self.abandon(each)  # it had to wait for another one
        elif engine.state is State.SILENT and self.members.has_other(engine):
            self.counts["lost"] += 1
            self.abandon(engine)
        else:
            self._hurry()

    def lost(self, engine: EngineLink) -> None:
        """Leave an engine whose link has ended."""
        self.counts["lost"] += not (engine.is_draining or engine.is_held)
        del self.members.by_number[engine.number]
        self.abandon(engine)
        self.router.remove(engine.number)
        self._prefixes.leave(engine)
        if not engine.is_held:
            self.admission.max_running -= engine.places
        self._hurry()
        self.members.announce()

    def _hurry(self) -> None:
        """Give requests to engines that are not warm yet if no other one is left."""
        if self.members.problem() is not None:
            for engine in self.engines:
                engine.warmed()

    def hold(self, engine: EngineLink, *, is_held: bool) -> None:
        """Give an engine no requests, or give it some again."""
        if engine.is_held == is_held:
            return
        if engine.number in self.members.by_number:
            self.admission.max_running -= engine.places if is_held else -engine.places
        engine.hold(is_held=is_held)

    def open_requests(self, engine: EngineLink) -> int:
        """Return how many completions and questions an engine has not answered."""
        load = self.router.loads.get(engine.number)
        return self.questions.count(engine) + (0 if load is None else load.open)

    def abandon(self, engine: EngineLink) -> None:
        """Let other engines continue and answer what one has not finished."""
        self._continuing.abandon(engine)
        self.questions.abandon(engine)

    def export(self, engine: EngineLink) -> None:
        """Let other engines continue what one has not finished, with its state.

        They answer questions of it, too.
        """
        self._continuing.export(engine)
        self.questions.abandon(engine)

    def received(self, engine: EngineLink, message: Message) -> None:
        """Apply a message of an engine about a request."""
        if isinstance(message, News):
            self._news.apply(message)
        elif isinstance(message, Answered):
            if message.failure is not None and self.warming.ended(message.number):
                return
            group = self.calls.groups.get(message.number)
            if group is None or group.answered.done():
                return
            if message.failure is None:
                group.answered.set_result(None)
            else:
                group.answered.set_exception(message.failure.error())
        elif isinstance(message, Prefixes):
            self._prefixes.apply(engine, message)
        elif isinstance(message, Exported):
            self._continuing.exported(engine, message)
        elif isinstance(message, Forwarded | Recalled):
            self.questions.answered(message)
        else:
            log.warning("engine %s: sent %s", engine.address, type(message).__name__)
