"""The calls of one front-end, in the engine's process."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inl.errors import RequestError
from inl.serve.api_error import as_api_error
from inl.serve.frontends.messages import (
    Answered,
    End,
    Exported,
    Failure,
    Leave,
    News,
    Scores,
    Stop,
    Submit,
)
from inl.serve.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inl.engine.request_handle import RequestHandle
    from inl.kv_transfer.spans import SequenceContents
    from inl.serve.frontends.link import Link
    from inl.serve.frontends.moving import Moving
    from inl.serve.frontends.transcripts import Transcripts
    from inl.serve.generations import Generation
    from inl.serve.model_slot import ModelSlot
    from inl.serve.models import Models
    from inl.serve.open_call import OpenCall

log = logging.getLogger("inl.serve")


@dataclass(slots=True)
class _Output:
    """A completion of a call, and how many of its tokens have been sent."""

    number: int
    item: Generation
    handle: RequestHandle
    tokens: list[int]
    """All tokens of the handle, which adds to them."""
    call: Call
    sent: int
    """Those of another engine included."""
    has_begun: bool = False
    is_exported: bool = False
    """Whether another engine is to continue it."""


class Call:
    """One call of a front-end: runs until the front-end leaves it."""

    def __init__(self, submit: Submit) -> None:
        self.first = submit.first
        self.left: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it was answered, once the front-end has left it."""
        self.task: asyncio.Task[None] | None = None
        self.slot: ModelSlot | None = None
        """Its model, once it has begun."""
        self._submit = submit
        self._open_call: OpenCall | None = None

    async def run(self, calls: Calls) -> None:
        """Admit and generate; ends when the front-end leaves it or it is refused."""
        given = self._submit
        options = given.options
        if given.seconds is not None:
            options = {**options, "deadline": time.time() + given.seconds}
        job = Job(
            given.model,
            given.prompts,
            options,  # type: ignore[arg-type]
            given.count,
            structure=given.structure,
            number=given.request,
            output_ids=given.output_ids,
            contents=await self._contents(calls),
        )
        numbers: range = range(0)
        try:
            slot = calls.models.find(given.model)
            async with slot.generate(job, given.client, calls) as open_call:
                self.slot, self._open_call = slot, open_call
                items = open_call.items
                numbers = range(self.first, self.first + len(items))
                for number, item in zip(numbers, items, strict=True):
                    tokens = item.handle.token_ids
                    calls.outputs[number] = _Output(
                        number, item, item.handle, tokens, self, len(given.output_ids)
                    )
                self._remember(calls.transcripts, items)
                calls.link.send(Answered(self.first, sampling=open_call.sampling))
                calls.flush()
                if await self.left:
                    open_call.finish()
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                log.exception("a request of a front-end failed")
            calls.link.send(Answered(self.first, Failure.of(failure)))
        finally:
            for number in numbers:
                calls.outputs.pop(number, None)
            if given.transcript and self._open_call is not None:
                for at, item in enumerate(self._open_call.items, given.position):
                    calls.transcripts.end(given.transcript, at, item)

    async def _contents(self, calls: Calls) -> SequenceContents | None:
        """Take what another engine holds of its only completion."""
        given = self._submit
        if given.state is None or calls.moving is None:
            return None
        tokens = [*given.prompts[0], *given.output_ids]
        return await calls.moving.take(*given.state, tokens)

    def _remember(self, transcripts: Transcripts, items: Sequence[Generation]) -> None:
        given = self._submit
        for at, item in enumerate(items if given.transcript else (), given.position):
            transcripts.begin(given.transcript, at, item)

    def begin(self) -> None:
        """Record that a completion has produced a token."""
        assert self._open_call is not None, "it has outputs"
        self._open_call.begin()

    def free_places(self) -> None:
        """Free the places of the call if all of its completions have finished."""
        assert self._open_call is not None, "it has outputs"
        self._open_call.free_places()

    def stop(self, index: int) -> None:
        """End a completion at a stop string, as the engine itself would."""
        if self._open_call is not None:
            item = self._open_call.items[index]
            if item.handle.finish_reason is None:
                item.handle.finish_reason = "stop"
                self._open_call.cancel(item)


def _end(output: _Output) -> End:
    handle = output.handle
    assert handle.finish_reason is not None, "checked by the caller"
    failure = None
    if handle.error is not None:
        failure = Failure.of(as_api_error(handle.error))
    request = output.item.first_request
    prompt = None
    if request.prompt_logprobs is not None:
        prompt = list(request.prompt_token_logprobs)
    return End(
        output.number, handle.finish_reason, handle.has_end_token, failure, prompt
    )


class _Counts:
    """Tokens of one message, for the metrics of a model."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.counts: list[int] = []
        self.firsts: list[float] = []


class Calls:
    """All calls of a front-end. Used by the event loop only.

    transcripts: remember the outputs of calls that ask for it. moving: of requests
    that go to other engines.
    """

    def __init__(
        self,
        models: Models,
        link: Link,
        transcripts: Transcripts,
        moving: Moving | None = None,
    ) -> None:
        self.models, self.moving = models, moving
        self.link = link
        self.transcripts = transcripts
        self.outputs: dict[int, _Output] = {}
        """Completions that have not finished, by number."""
        self._open: dict[int, Call] = {}

    def submit(self, message: Submit) -> None:
        """Start a call."""
        call = Call(message)
        self._open[message.first] = call
        call.task = asyncio.create_task(call.run(self))
        call.task.add_done_callback(lambda _: self._open.pop(message.first, None))

    def stop(self, message: Stop) -> None:
        """End a completion at a stop string."""
        if (call := self._open.get(message.first)) is not None:
            call.stop(message.index)

    def leave(self, message: Leave) -> None:
        """End a call."""
        if (call := self._open.get(message.first)) is None:
            return
        if call.slot is not None:
            if not call.left.done():
                call.left.set_result(message.finished)
        elif call.task is not None:
            call.task.cancel()

    async def export(self, number: int) -> None:
        """End a completion that another engine is to continue, and say where it is."""
        output = self.outputs.get(number)
        if output is None or self.moving is None or output.is_exported:
            return  # its end is on its way
        output.is_exported = True
        found = 0, ""
        try:
            slot = output.call.slot
            if slot is not None and (engine := slot.engine) is not None:
                found = await self.moving.export(engine, output.handle)
        except RequestError as error:
            log.info("a request is not moved: %s", error)
            if output.handle.completed:
                output.is_exported = False
                self.flush()
                return
        self.flush()
        if self.outputs.pop(number, None) is not None:
            output.call.free_places()
            self.link.send(Exported(number, *found))

    async def export_all(self) -> None:
        """End all completions that have begun, as :meth:`export`."""
        await asyncio.gather(*map(self.export, list(self.outputs)))

    async def abort(self) -> None:
        """End all calls: the front-end has ended."""
        tasks = [call.task for call in self._open.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def flush(self) -> None:
        """Send what all calls have generated as one message.

        Nothing while the front-end is behind: its tokens are then sent together.
        """
        if self.link.is_behind:
            return
        news = News([], [], [], [], [])
        found: dict[ModelSlot, _Counts] = {}
        numbers, parts = news.numbers, news.tokens
        for output in self.outputs.values():
            # Read before the tokens, so that the last ones are not lost.
            reason = output.handle.finish_reason
            sent, tokens = output.sent, output.tokens
            if len(tokens) > sent:
                part = tokens[sent:]
                numbers.append(output.number)
                parts.append(part)
                _count(output, len(part), news, found)
            if reason is not None and not output.is_exported:
                news.ends.append(_end(output))
        for end in news.ends:
            self.outputs.pop(end.number).call.free_places()
        if numbers or news.ends:
            self.link.send(news)
        for slot, each in found.items():
            slot.metrics.record_tokens(each.numbers, each.counts, each.firsts)


def _count(
    output: _Output, count: int, news: News, found: dict[ModelSlot, _Counts]
) -> None:
    """Record new tokens of a completion, and what else the front-end needs of them."""
    handle, slot = output.handle, output.call.slot
    assert slot is not None, "it has outputs"
    if (counts := found.get(slot)) is None:
        counts = found[slot] = _Counts()
    if not output.has_begun:
        output.has_begun = True
        output.call.begin()
        news.cached.append((output.number, output.item.first_request.cached_tokens))
        if not output.sent:
            counts.firsts.append(handle.first_token_seconds)
    output.sent += count
    request = handle.request
    counts.numbers.append(request.id)
    counts.counts.append(count)
    if request.logprobs is not None:
        part = request.token_logprobs[output.sent - count : output.sent]
        news.scores.append(Scores(output.number, part))
