"""What engines have generated, by the numbers of the front-end."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from inl.serve.frontends.messages import End, News, Scores

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from inl.fleet.calls import Part
    from inl.fleet.continuing import Continuing
    from inl.fleet.open_calls import OpenCalls
    from inl.fleet.router import Router
    from inl.fleet.warming import Warming

log = logging.getLogger("inl.serve")


class EngineNews:
    """Applies outputs. counts: totals to add to."""

    def __init__(
        self,
        calls: OpenCalls,
        router: Router,
        warming: Warming,
        continuing: Continuing,
        counts: Counter[str],
    ) -> None:
        self._calls, self._router, self._counts = calls, router, counts
        self._warming, self._continuing = warming, continuing
        self.continue_seconds: list[float] = []
        """Newest times from noticing the loss of an engine to the next token."""

    def apply(self, news: News) -> None:
        """Apply outputs, by the numbers of the front-end; unknown ones are left out."""
        translated = News([], [], [], [], [])
        again: set[int] = set()
        """Numbers whose first token was generated before."""
        for number, cached in news.cached:
            self._began(number, cached, translated)
        for number, tokens in zip(news.numbers, news.tokens, strict=True):
            part = self._calls.parts.get(number)
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
            if (part := self._calls.parts.get(scores.number)) is not None:
                logprobs = scores.logprobs[scores.number in again :]
                translated.scores.append(Scores(part.number, logprobs))
        ended = []
        for end in news.ends:
            part = self._calls.parts.get(end.number)
            if part is None:
                self._warming.ended(end.number)
                continue
            if end.failure is not None and end.failure.status >= 500:
                self._failed(part, end)
                continue
            ended.append(part)
            end.number = part.number
            translated.ends.append(end)
        self._calls.outputs.apply(translated)
        for part in ended:
            self._calls.ended(part)

    def _began(self, number: int, cached: int, translated: News) -> None:
        """Record the first token of a completion at its engine."""
        part = self._calls.parts.get(number)
        if part is None or part.group is None:
            return
        call, group = part.call, part.group
        self._calls.admission.begun(call.ticket)
        self._router.record_first(group.assignments[number - group.first], cached)
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
        self._counts["diverged"] += 1
        log.warning(
            "a request was continued on %s, which has token %d at place %d where the "
            "engine before had %s; it goes on after that",
            part.group and part.group.engine.device, tokens[0],
            len(part.handle.token_ids) - 1, expected,
        )  # fmt: skip
        if part.group is not None:
            self._calls.end(part.group, finished=False)
        self._continuing.move(part, time.monotonic(), verifies=False)
        return False

    def _failed(self, part: Part, end: End) -> None:
        """Continue a completion that its engine could not."""
        assert end.failure is not None, "checked by the caller"
        log.warning("a request failed on an engine: %.200s", end.failure.message)
        group = part.group
        if group is not None and len(group.parts) == 1:
            self._calls.end(group, finished=False)
        elif group is not None:
            self._calls.parts.pop(group.first + list(group.parts).index(part))
        self._continuing.move(
            part, time.monotonic(), avoided=None if group is None else group.engine
        )
