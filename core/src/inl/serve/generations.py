"""The completions of one job while they are generated."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from inl.serve.api_error import ApiError, as_api_error
from inl.serve.job import Answer, Delta, Phases, PromptScores, Usage
from inl.serve.token_texts import NoTokenTexts, TokenPlaces

if TYPE_CHECKING:
    from inl.engine.answers.output_parser import OutputParser
    from inl.engine.request_handle import RequestHandle
    from inl.serve.job import CallDelta, FinishReason
    from inl.serve.token_texts import TokenTexts


SHORT_DELTA = 256
"""Tokens after which the event loop does other work before it reads more."""


class Generation(Answer):
    """One completion: reads a handle, splits its text, and sums up what it has read.

    stop: ends the request of a handle. token_texts: of its model. first: handle of the
    first completion of its prompt. call_ids: makes the ids of its tool calls, if others
    must find the same ones.
    """

    def __init__(
        self,
        handle: RequestHandle,
        parser: OutputParser,
        stop: Callable[[RequestHandle], None],
        token_texts: TokenTexts,
        *,
        first: RequestHandle,
        call_ids: str = "",
    ) -> None:
        super().__init__()
        self.handle = handle
        self.is_first = handle is first
        self.first_request = first.request
        """Has the log-probabilities and the cached tokens of the prompt."""
        self.submitted = time.perf_counter()
        self.reasoning_tokens = 0
        self.phases: Phases | None = None
        """Set at the end, if it has produced a token."""
        self.polled_tokens = 0
        """Tokens of all deltas."""
        self.is_one_delta = False
        """Whether what is left becomes one delta, at the end."""
        self._call_ids = call_ids
        self._end_tokens: int | None = None
        """Tokens up to where the parser ended the answer, if it did."""
        self._parser = parser
        self._stop = stop
        self._places = TokenPlaces(token_texts, skip_special=False)
        self._token_ends: list[int] = []
        """Characters up to the end of each token, special ones included, as far as a
        place was looked for."""
        self._reasoning_end: int | None = 0

    def poll(self) -> Delta:
        """Return what was generated since the last call; raises :class:`ApiError`."""
        handle, start = self.handle, self.polled_tokens
        # Read before the tokens, so that the last ones are not lost.
        completed = handle.completed
        if self.is_one_delta and not completed:
            return Delta()
        token_ids = handle.token_ids[start:]
        self.polled_tokens += len(token_ids)
        if token_ids and not self.began:
            self.began = time.perf_counter()
        parser = self._parser
        if parser.sees_special:
            delta = parser.feed(*handle.take_whole())
        else:
            delta = parser.feed(handle.take())
        if parser.end is not None:
            if not completed:
                handle.finish_reason, completed = "stop", True
                self._stop(handle)
            # The engine was ahead of what the answer has.
            self._end_tokens = max(self._tokens_until(parser.end), start)
            self.polled_tokens = self._end_tokens
            token_ids = token_ids[: self._end_tokens - start]
        if completed:
            delta = self._finished(delta)
        delta.token_ids = token_ids
        if handle.request.logprobs is not None:
            delta.logprobs = handle.request.token_logprobs[start : self.polled_tokens]
        if delta.calls and self._call_ids:
            delta.calls = [self._with_id(part) for part in delta.calls]
        self._count_reasoning()
        self.add(delta)
        return delta

    def _with_id(self, part: CallDelta) -> CallDelta:
        if part.id is None:
            return part
        digest = hashlib.sha256(f"{self._call_ids} {part.index}".encode())
        return replace(part, id=f"call_{digest.hexdigest()[:24]}")

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far, those that were not read yet included."""
        if self._end_tokens is not None:
            return self._end_tokens
        return len(self.handle.token_ids)

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return self.first_request.tokens[: self.first_request.prompt_tokens]

    def _count_reasoning(self) -> None:
        """Count the tokens of the reasoning and its marks, however they arrived."""
        end = self._parser.reasoning_end
        if end is None:
            self._place_tokens()  # in each poll, not at once: the event loop runs it
            self.reasoning_tokens = self.polled_tokens
        elif end != self._reasoning_end:
            self.reasoning_tokens = self._tokens_until(end)
        self._reasoning_end = end

    def _tokens_until(self, end: int) -> int:
        """Return how many polled tokens have a number of characters."""
        self._place_tokens()
        return min(bisect_left(self._token_ends, end) + 1, self.polled_tokens)

    def _place_tokens(self) -> None:
        for token in self.handle.token_ids[len(self._token_ends) : self.polled_tokens]:
            self._places.add(token)
            self._token_ends.append(self._places.offset)

    def _finished(self, delta: Delta) -> Delta:
        handle = self.handle
        self.ended = time.perf_counter()
        if handle.error is not None:
            raise as_api_error(handle.error)
        if handle.finish_reason == "cancelled":
            raise ApiError(503, "the request was aborted", code="aborted")
        last = self._parser.finish()
        limits = ("length", "deadline")
        reason: FinishReason = "length" if handle.finish_reason in limits else "stop"
        stop = None
        if self._parser.end is not None:
            reason = "tool_calls"
        elif handle.stopped:
            reason, stop = "stop_string", handle.stop_string
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


class Generations(ABC):
    """All completions of a job; :meth:`close` must be called."""

    def __init__(self) -> None:
        self.items: list[Generation] = []
        self.event = asyncio.Event()
        """Set whenever a handle has news."""
        self.token_text: TokenTexts = NoTokenTexts()
        self._open: dict[int, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def record(self, item: Generation, count: int) -> None:
        """Record ``count`` new tokens of a completion."""

    def start(self, items: list[Generation], token_text: TokenTexts) -> None:
        """Set the completions, once the model is loaded."""
        self.items, self.token_text = items, token_text
        self._open = dict(enumerate(items))

    @property
    def engine(self) -> str:
        """Name of the engine that generates the first one, in a fleet."""
        return ""

    @property
    def sampling(self) -> tuple[float, float] | None:
        """Temperature and ``top_p`` of its completions, defaults included."""
        request = self.items[0].handle.request
        return request.temperature, request.top_p

    @property
    def finished(self) -> bool:
        """Whether all completions have started and finished."""
        return bool(self.items) and not self._open

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once for all its completions."""
        prompts = [item.handle.request for item in self.items if item.is_first]
        return Usage(
            prompt_tokens=sum(each.prompt_tokens for each in prompts),
            completion_tokens=sum(item.completion_tokens for item in self.items),
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
            await self.event.wait()
            self.event.clear()
            # The last poll may have taken what this event announced.
            is_idle = loop.time() >= latest + idle_seconds
            for index, item in list(self._open.items()):
                delta = item.poll()
                if not delta:
                    continue
                if len(delta.token_ids) > SHORT_DELTA:
                    await asyncio.sleep(0)
                is_idle = False
                latest = loop.time()
                if delta.token_ids:
                    self.record(item, len(delta.token_ids))
                if delta.finish_reason is not None:
                    del self._open[index]
                yield index, delta
            if is_idle:
                latest = loop.time()
                yield None

    def finish(self) -> None:
        """Record that all have finished, where no deltas are read."""
        self._open.clear()

    def close(self) -> None:
        """Read no more deltas. Closing twice is allowed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None
        self.event.set()
