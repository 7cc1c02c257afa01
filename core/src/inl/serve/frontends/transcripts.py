"""Outputs that an engine remembers, so that the stream of a client can go on."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inl.serve.generations import Generation

MAX_TOKENS = 1 << 22
"""Tokens of all outputs that have ended, of four bytes each."""

ENTRY_TOKENS = 64
"""Tokens that take the memory of what else an output is remembered with."""

SECONDS = 600.0
"""Time that an output is remembered after its end."""

Key = tuple[bytes, int]
"""Name of a transcript, and the position of a completion in it."""


@dataclass(frozen=True, slots=True)
class _Ended:
    tokens: array[int]
    cached: int
    at: float


class Transcripts:
    """Tokens of open and ended completions, by name. Used by the event loop only.

    Of the ended ones, those that ended first are forgotten beyond ``max_tokens``, and
    all after ``seconds``.
    """

    def __init__(
        self,
        max_tokens: int = MAX_TOKENS,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens = 0
        """Of all that have ended, with the :data:`ENTRY_TOKENS` of each."""
        self._max_tokens, self._seconds, self._clock = max_tokens, seconds, clock
        self._open: dict[Key, Generation] = {}
        self._ended: OrderedDict[Key, _Ended] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def begin(self, name: bytes, position: int, item: Generation) -> None:
        """Remember a completion while it is open."""
        self._open[name, position] = item

    def end(self, name: bytes, position: int, item: Generation) -> None:
        """Remember a completion for a time."""
        key = name, position
        if self._open.get(key) is not item:
            return  # another connection has begun it again
        del self._open[key]
        self._forget(key)
        tokens = array("i", item.handle.token_ids)
        ended = _Ended(tokens, item.first_request.cached_tokens, self._clock())
        self._ended[key] = ended
        self.tokens += len(tokens) + ENTRY_TOKENS
        self._forget_old()

    def find(self, name: bytes, count: int) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of each completion, and the cached ones of its prompt."""
        self._forget_old()
        tokens: list[list[int]] = []
        cached = []
        for key in ((name, position) for position in range(count)):
            if (opened := self._open.get(key)) is not None:
                tokens.append(list(opened.handle.token_ids))
                cached.append(opened.first_request.cached_tokens)
            elif (ended := self._ended.get(key)) is not None:
                tokens.append(ended.tokens.tolist())
                cached.append(ended.cached)
            else:
                tokens.append([])
                cached.append(0)
        return tokens, cached

    def _forget(self, key: Key) -> None:
        if (ended := self._ended.pop(key, None)) is not None:
            self.tokens -= len(ended.tokens) + ENTRY_TOKENS

    def _forget_old(self) -> None:
        oldest = self._clock() - self._seconds
        while self._ended:
            key, ended = next(iter(self._ended.items()))
            if ended.at > oldest and self.tokens <= self._max_tokens:
                return
            self._forget(key)
