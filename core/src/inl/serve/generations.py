"""The completions of one job while they are generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from inl.serve.api_error import ApiError, as_api_error
from inl.serve.job import Delta, Phases, PromptScores, Usage

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle
    from inl.serve.dialect import TokenText
    from inl.serve.job import FinishReason
    from inl.serve.output_parser import OutputParser


RecordTokens = Callable[[Sequence[int], Sequence[int], Sequence[float]], None]
"""As :meth:`~inl.serve.metrics.ModelMetrics.record_tokens`."""


class Generation:
    """One completion: reads a handle and splits its text.

    stop_string: returns the stop string in the text of token ids, if there is one.
    first: handle of the first completion of its prompt.
    """

    def __init__(
        self,
        handle: RequestHandle,
        parser: OutputParser,
        stop_string: Callable[[list[int]], str | None],
        *,
        first: RequestHandle,
    ) -> None:
        self.handle = handle
        self.is_first = handle is first
        self.first_request = first.request
        """Has the log-probabilities and the cached tokens of the prompt."""
        self.submitted = time.perf_counter()
        self.reasoning_tokens = 0
        self.phases: Phases | None = None
        """Set at the end, if it has produced a token."""
        self._parser = parser
        self._stop_string = stop_string
        self._polled_tokens = 0

    def poll(self) -> Delta:
        """Return what was generated since the last call; raises :class:`ApiError`."""
        handle, start = self.handle, self._polled_tokens
        # Read before the tokens, so that the last ones are not lost.
        completed = handle.completed
        token_ids = handle.token_ids[start:]
        self._polled_tokens += len(token_ids)
        delta = self._parser.feed(handle.take())
        if completed:
            delta = self._finished(delta)
        delta.token_ids = token_ids
        if handle.request.logprobs is not None:
            delta.logprobs = handle.request.token_logprobs[start : self._polled_tokens]
        if delta.reasoning:
            self.reasoning_tokens += len(token_ids)
        return delta

    def record(self, record_tokens: RecordTokens, count: int) -> None:
        """Record ``count`` tokens of the last delta."""
        is_first = self._polled_tokens == count
        firsts = [self.handle.first_token_seconds] if is_first else []
        record_tokens([self.handle.request.id], [count], firsts)

    def _finished(self, delta: Delta) -> Delta:
        handle = self.handle
        if handle.error is not None:
            raise as_api_error(handle.error)
        if handle.finish_reason == "cancelled":
            raise ApiError(503, "the request was aborted", code="aborted")
        last = self._parser.finish()
        limits = ("length", "deadline")
        reason: FinishReason = "length" if handle.finish_reason in limits else "stop"
        stop = None
        if handle.stopped:
            reason, stop = "stop_string", self._stop_string(handle.token_ids)
        elif self._parser.has_calls and reason == "stop":
            reason = "tool_calls"
        return replace(
            last,
            content=delta.content + last.content,
            reasoning=delta.reasoning + last.reasoning,
            calls=[*delta.calls, *last.calls],
            finish_reason=reason,
            stop_string=stop,
            prompt=self._prompt_scores(),
        )

    def _prompt_scores(self) -> PromptScores | None:
        request = self.first_request
        if request.prompt_logprobs is None:
            return None
        ids = request.tokens[: request.prompt_tokens]
        return PromptScores(ids, list(request.prompt_token_logprobs))


class Generations:
    """All completions of a job; :meth:`close` must be called.

    event: set whenever a handle has news. on_close: called once.
    """

    def __init__(
        self,
        items: list[Generation],
        event: asyncio.Event,
        *,
        token_text: TokenText,
        on_begin: Callable[[], None],
        on_tokens: RecordTokens,
        on_close: Callable[[], None],
        cancel: Callable[[RequestHandle], None],
    ) -> None:
        self.items = items
        self.token_text = token_text
        self._event = event
        self._open = dict(enumerate(items))
        self._timer: asyncio.TimerHandle | None = None
        self._on_begin = on_begin
        self._on_tokens = on_tokens
        self.cancel = cancel
        """Ends the request of a handle."""
        self._on_close: Callable[[], None] | None = on_close

    @property
    def finished(self) -> bool:
        """Whether all completions have finished."""
        return not self._open

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once for all its completions."""
        prompts = [item.handle.request for item in self.items if item.is_first]
        return Usage(
            prompt_tokens=sum(each.prompt_tokens for each in prompts),
            completion_tokens=sum(len(item.handle.token_ids) for item in self.items),
            cached_tokens=sum(each.cached_tokens for each in prompts),
            reasoning_tokens=sum(item.reasoning_tokens for item in self.items),
        )

    async def deltas(
        self, idle_seconds: float
    ) -> AsyncIterator[tuple[int, Delta] | None]:
        """Yield (index, delta) until all have finished; raises :class:`ApiError`.

        ``None`` is yielded after ``idle_seconds`` without any.
        """
        loop = asyncio.get_running_loop()
        latest = loop.time()
        while self._open:
            if self._timer is None:
                # One for many events: tokens only delay the next one.
                self._timer = loop.call_at(latest + idle_seconds, self._wake)
            await self._event.wait()
            self._event.clear()
            # The last poll may have taken what this event announced.
            is_idle = loop.time() >= latest + idle_seconds
            for index, item in list(self._open.items()):
                delta = item.poll()
                if not delta:
                    continue
                is_idle = False
                latest = loop.time()
                if delta.token_ids:
                    self.begin()
                    item.record(self._on_tokens, len(delta.token_ids))
                if delta.finish_reason is not None:
                    del self._open[index]
                yield index, delta
            if is_idle:
                latest = loop.time()
                yield None

    def begin(self) -> None:
        """Record that a completion has produced a token."""
        self._on_begin()

    def finish(self) -> None:
        """Record that all have finished, where no deltas are read."""
        self._open.clear()

    def abort(self) -> None:
        """End all that have not finished with an error."""
        for item in self._open.values():
            self.cancel(item.handle)

    def _wake(self) -> None:
        self._timer = None
        self._event.set()

    def close(self) -> None:
        """Cancel what has not finished. Closing twice is allowed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()
