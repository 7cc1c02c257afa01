"""The completions of a job of a front-end, and of a stream that goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from inl.serve.api_error import ApiError, as_api_error
from inl.serve.frontends.outputs import RemoteHandle
from inl.serve.generations import Generation, Generations

if TYPE_CHECKING:
    from inl.engine.request_handle import TokenLogprob
    from inl.serve.frontends.messages import Answered
    from inl.serve.job import Delta
    from inl.serve.resuming import Seen
    from inl.serve.token_texts import TokenTexts


class RemoteGenerations(Generations):
    """The completions of a job of a front-end."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: Answered | None = None
        """The reply to the job."""

    @property
    def sampling(self) -> tuple[float, float] | None:
        """Those of the engine; ``None`` before its reply."""
        return None if self.answered is None else self.answered.sampling

    @property
    def engine(self) -> str:
        """Name of the engine that generates the first one, in a fleet."""
        handle = self.items[0].handle
        assert isinstance(handle, RemoteHandle), "made here"
        return handle.engine

    def record(self, item: Generation, count: int) -> None:
        """Do nothing: the engine's process counts tokens."""


@dataclass(slots=True)
class KnownOutput:
    """The first tokens of a completion, and more of them than its client has."""

    tokens: list[int]
    cached: int
    """Tokens of its prompt that were cached."""
    logprobs: list[TokenLogprob] = field(default_factory=list)


def has_tokens(handle: RemoteHandle, count: int) -> bool:
    """Whether a completion has so many tokens, or will have no more."""
    return handle.completed or len(handle.token_ids) >= count


def known_output(handle: RemoteHandle, count: int) -> KnownOutput:
    """Return an output that was generated again; raises :class:`ApiError`."""
    if handle.error is not None:
        raise as_api_error(handle.error)
    if len(handle.token_ids) < count:
        raise ApiError(
            409,
            f"last-event-id: found {count} tokens in it, where the answer has "
            f"{len(handle.token_ids)}; leave it out to begin again",
            code="other_stream",
        )
    request = handle.request
    return KnownOutput(
        handle.token_ids, request.cached_tokens, list(request.token_logprobs)
    )


@final
class ResumedGenerations(RemoteGenerations):
    """Completions whose first deltas a client has: they are made again.

    seen: what the client has. known: output of each completion, as far as that.
    """

    def __init__(self, seen: Seen, known: Sequence[KnownOutput]) -> None:
        super().__init__()
        self._seen, self._known = seen, known
        self._again: list[tuple[int, Delta]] = []

    def start(self, items: list[Generation], token_text: TokenTexts) -> None:
        """Set the completions, and read what the client has of them."""
        super().start(items, token_text)
        for index, place in enumerate(self._seen.places):
            # An end token has text while it is not known to be one.
            items[index].is_one_delta = place.is_finished
            self._read(index, place.tokens)
        if (newest := self._seen.newest) is not None and self._seen.part is not None:
            after = self._seen.part.after
            items[newest].is_one_delta = after.is_finished
            self._read(newest, after.tokens)

    def _read(self, index: int, count: int) -> None:
        """Let a completion have ``count`` tokens, and read its delta."""
        item, known = self.items[index], self._known[index]
        handle = item.handle
        assert isinstance(handle, RemoteHandle), "made for this"
        start = len(handle.token_ids)
        handle.request.cached_tokens = known.cached
        handle.request.token_logprobs += known.logprobs[start:count]
        handle.receive(known.tokens[start:count])
        if delta := item.poll():
            self._again.append((index, delta))
        if delta.finish_reason is not None:
            del self._open[index]

    async def deltas(
        self, idle_seconds: float
    ) -> AsyncIterator[tuple[int, Delta] | None]:
        """Yield the deltas that the client has, merged, and then the others."""
        for each in self._again:
            yield each
        async for item in super().deltas(idle_seconds):
            yield item
