"""The calls of one front-end, in the engine's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inl.serve.api_error import as_api_error
from inl.serve.frontends.messages import (
    Answered,
    End,
    Failure,
    Leave,
    News,
    Scores,
    Stop,
    Submit,
)
from inl.serve.job import Job

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle
    from inl.serve.frontends.link import Link
    from inl.serve.generations import Generation, Generations
    from inl.serve.metrics import ModelMetrics
    from inl.serve.models import Models

log = logging.getLogger("inl.serve")


@dataclass(slots=True)
class _Output:
    """A completion, and how many of its tokens have been sent."""

    number: int
    item: Generation
    sent: int = 0


class Call:
    """One call of a front-end: runs until the front-end leaves it.

    report: called with the call when it has news.
    """

    def __init__(self, submit: Submit, report: Callable[[Call], None]) -> None:
        self.first = submit.first
        self.left: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it was answered, once the front-end has left it."""
        self.task: asyncio.Task[None] | None = None
        self.metrics: ModelMetrics | None = None
        self._submit = submit
        self._report = report
        self._generations: Generations | None = None
        self._outputs: list[_Output] = []

    def set(self) -> None:
        """Record that the engine has news of it."""
        self._report(self)

    async def run(self, models: Models, answer: Callable[[Answered], None]) -> None:
        """Admit and generate; ends when the front-end leaves it or it is refused."""
        given = self._submit
        job = Job(
            given.model,
            given.prompts,
            given.options,  # type: ignore[arg-type]
            given.count,
            structure=given.structure,
        )
        try:
            slot = models.find(given.model)
            async with slot.generate(job, given.client, self) as generations:
                self.metrics, self._generations = slot.metrics, generations
                self._outputs = [
                    _Output(self.first + at, item)
                    for at, item in enumerate(generations.items)
                ]
                answer(Answered(self.first))
                self.set()
                if await self.left:
                    generations.finish()
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                log.exception("a request of a front-end failed")
            answer(Answered(self.first, Failure.of(failure)))
        finally:
            self._outputs = []  # the engine may still report it

    def stop(self, index: int) -> None:
        """End a completion at a stop string, as the engine itself would."""
        if self._generations is not None:
            handle = self._generations.items[index].handle
            if handle.finish_reason is None:
                handle.finish_reason = "stop"
                self._generations.cancel(handle)

    def collect(self, news: News, counts: Counts) -> None:
        """Add what the completions have generated since the last call."""
        ended = False
        for output in self._outputs:
            handle = output.item.handle
            # Read before the tokens, so that the last ones are not lost.
            reason = handle.finish_reason
            tokens = handle.token_ids[output.sent :]
            if tokens:
                if not output.sent:
                    self._begin(output, news)
                output.sent += len(tokens)
                news.numbers.append(output.number)
                news.tokens.append(tokens)
                counts.add(self.metrics, handle, len(tokens))
                if handle.request.logprobs is not None:
                    stop = output.sent
                    part = handle.request.token_logprobs[stop - len(tokens) : stop]
                    news.scores.append(Scores(output.number, part))
            if reason is not None:
                ended = True
                news.ends.append(_end(output))
        if ended:
            self._outputs = [
                each for each in self._outputs if each.item.handle.finish_reason is None
            ]

    def _begin(self, output: _Output, news: News) -> None:
        assert self._generations is not None, "it has outputs"
        self._generations.begin()
        cached = output.item.first_request.cached_tokens
        news.cached.append((output.number, cached))


def _end(output: _Output) -> End:
    handle = output.item.handle
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


class Counts:
    """Tokens of one message, for the metrics of each model."""

    def __init__(self) -> None:
        self._found: dict[ModelMetrics, tuple[list[RequestHandle], list[int]]] = {}

    def add(
        self, metrics: ModelMetrics | None, handle: RequestHandle, count: int
    ) -> None:
        """Add the new tokens of a request."""
        assert metrics is not None, "the call has begun"
        if (found := self._found.get(metrics)) is None:
            found = self._found[metrics] = ([], [])
        found[0].append(handle)
        found[1].append(count)

    def record(self) -> None:
        """Record all."""
        for metrics, (handles, counts) in self._found.items():
            metrics.record_tokens(handles, counts)


class Calls:
    """All calls of a front-end. Used by the event loop only."""

    def __init__(self, models: Models, link: Link) -> None:
        self._models = models
        self._link = link
        self._open: dict[int, Call] = {}
        self._news: dict[Call, None] = {}
        """Calls with news that are not sent."""
        self._is_scheduled = False

    def submit(self, message: Submit) -> None:
        """Start a call."""
        call = Call(message, self._report)
        self._open[message.first] = call
        call.task = asyncio.create_task(call.run(self._models, self._link.send))
        call.task.add_done_callback(lambda _: self._open.pop(message.first, None))

    def stop(self, message: Stop) -> None:
        """End a completion at a stop string."""
        if (call := self._open.get(message.first)) is not None:
            call.stop(message.index)

    def leave(self, message: Leave) -> None:
        """End a call."""
        if (call := self._open.get(message.first)) is None:
            return
        self._news.pop(call, None)
        if call.metrics is not None:
            if not call.left.done():
                call.left.set_result(message.finished)
        elif call.task is not None:
            call.task.cancel()

    async def abort(self) -> None:
        """End all calls: the front-end has ended."""
        calls = list(self._open.values())
        self._news.clear()
        for call in calls:
            if call.task is not None:
                call.task.cancel()
        tasks = [call.task for call in calls if call.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self, call: Call) -> None:
        self._news[call] = None
        if not self._is_scheduled and not self._link.is_behind:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send the news of all calls as one message.

        Nothing while the front-end is behind: its tokens are then sent together.
        """
        self._is_scheduled = False
        if not self._news or self._link.is_behind:
            return
        calls, self._news = self._news, {}
        news, counts = News([], [], [], [], []), Counts()
        for call in calls:
            call.collect(news, counts)
        if news.numbers or news.ends:
            self._link.send(news)
        counts.record()
