"""The output of requests of another process, as its messages arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from inl.config import EngineConfig
from inl.engine.options import stop_strings
from inl.engine.request_handle import RequestHandle

if TYPE_CHECKING:
    from inl.engine.options import GenerationOptions
    from inl.engine.request_handle import TokenLogprob
    from inl.serve.frontends.messages import End, News
    from inl.text.tokenizer import Tokenizer


_BOUNDS = EngineConfig()
"""Bounds of stop strings. Checking its values takes longer than a request does."""


@dataclass(slots=True)
class RemoteRequest:
    """What is known here of a request of the engine's process."""

    id: int
    """Number of the completion on the link."""
    tokens: list[int]
    logprobs: int | None
    prompt_logprobs: int | None
    cached_tokens: int = 0
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_token_logprobs: Sequence[TokenLogprob | None] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.tokens)


class RemoteHandle(RequestHandle):
    """A request of the engine's process; finds its stop strings here."""

    def __init__(
        self,
        request: RemoteRequest,
        tokenizer: Tokenizer | None,
        options: GenerationOptions,
    ) -> None:
        super().__init__(
            cast("Any", request),
            tokenizer,
            stop_strings(options.get("stop"), _BOUNDS),
            time.perf_counter(),
            skip_special=options.get("skip_special_tokens", True),
        )
        self.engine = ""
        """Name of the engine that generates it, in a fleet."""

    def receive(self, tokens: Sequence[int]) -> None:
        """Append generated tokens, up to the end of a stop string."""
        if not self._scans_text:
            self.token_ids += tokens
            return
        for token in tokens:
            self.token_ids.append(token)
            if self._text.may_stop(token):
                self._text.update(self._text_ids, ended=False)
            if self.stopped:
                self.finish_reason = "stop"
                return

    def finish(self, end: End) -> None:
        """Finish, unless a stop string has ended the output."""
        if not self.completed:
            self._end_tokens = int(end.has_end_token)
            error = None if end.failure is None else end.failure.error()
            self.end(end.reason, error)


Stopped = Callable[[RequestHandle], None]
"""Called when a stop string ends a request that goes on in the engine's process."""


class Outputs:
    """Applies messages to the handles of open requests, by number."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[RemoteHandle, Stopped]] = {}

    @contextmanager
    def open(self, handles: Sequence[RemoteHandle], stopped: Stopped) -> Iterator[None]:
        """Apply what arrives for some handles in the body."""
        numbers = [handle.request.id for handle in handles]
        pairs = ((handle, stopped) for handle in handles)
        self._open.update(zip(numbers, pairs, strict=True))
        try:
            yield
        finally:
            for number in numbers:
                self._open.pop(number, None)

    def handle(self, number: int) -> RemoteHandle:
        """Return the handle of an open request."""
        return self._open[number][0]

    def apply(self, news: News) -> None:
        """Append tokens and ends; what was left here is ignored."""
        for number, cached in news.cached:
            if (found := self._open.get(number)) is not None:
                found[0].request.cached_tokens = cached
        for scores in news.scores:
            if (found := self._open.get(scores.number)) is not None:
                found[0].request.token_logprobs += scores.logprobs
        for number, tokens in zip(news.numbers, news.tokens, strict=True):
            found = self._open.get(number)
            if found is None or found[0].finish_reason is not None:
                continue
            handle, stopped = found
            handle.receive(tokens)
            if handle.finish_reason is not None:
                stopped(handle)
            handle.notify()
        for end in news.ends:
            if (found := self._open.get(end.number)) is not None:
                handle, _ = found
                if end.prompt is not None:
                    handle.request.prompt_token_logprobs = end.prompt
                handle.finish(end)

    def fail(self, error: Exception) -> None:
        """End all open requests with an error."""
        for handle, _ in self._open.values():
            handle.fail(error)
