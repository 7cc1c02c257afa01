"""Streams that go on after their connection was lost: ids of events.

An event has an id. A client that was disconnected sends its request again, to any
front-end of the fleet, with the id of the last event that it has as ``Last-Event-ID``.
The id names everything that decides the answer and is not in the request, so that it
can be generated again, and how much of it the client has. A digest in it binds it to
the request, the API key and the weights.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from inl.engine.options import random_seed
from inl.serve.api_error import ApiError

if TYPE_CHECKING:
    from inl.serve.dialect import Exchange, ReadUsage, StreamWriter
    from inl.serve.generations import Generations
    from inl.serve.job import Answer, Delta, Job, Usage

HEADER = b"last-event-id"

MOST_COMPLETIONS = 16
"""Completions of a request whose events have ids, which hold the place of each."""

LONGEST_ID = 1024

OPENING, CLOSING = "o", "c"
"""Parts of a stream before the first delta and behind the last one."""

PLACE = re.compile(r"([0-9]{1,9})(f?)")
PART = re.compile(r"(o|c|[0-9]{1,2})~(?:([0-9]{1,9})(f?)~)?([0-9]{1,4})")


class Place(NamedTuple):
    """How much of a completion a client has."""

    tokens: int = 0
    is_finished: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}{'f' if self.is_finished else ''}"


class Part(NamedTuple):
    """A part of a stream of which a client has some events, but not all."""

    name: str
    """That of the opening or closing, or the index of a completion."""
    after: Place
    """Place of the completion behind it."""
    events: int
    """Those that the client has."""


class Seen(NamedTuple):
    """How much of a stream a client has."""

    events: int
    """Number of events."""
    places: tuple[Place, ...]
    part: Part | None = None
    """The part of the last event, if others of it follow."""

    def __str__(self) -> str:
        text = f"{self.events}.{'-'.join(map(str, self.places))}"
        if self.part is None:
            return text
        name, after, events = self.part
        middle = "" if name in (OPENING, CLOSING) else f"{after}~"
        return f"{text}.{name}~{middle}{events}"

    def events_of(self, name: str) -> int | None:
        """Return how many events of the opening or closing it ends in."""
        part = self.part
        return part.events if part is not None and part.name == name else None

    @property
    def tokens(self) -> list[int]:
        """Tokens of each completion that its events were written from."""
        counts = [place.tokens for place in self.places]
        if (index := self.completion) is not None and self.part is not None:
            counts[index] = self.part.after.tokens
        return counts

    @property
    def completion(self) -> int | None:
        """Index of the completion that has the part."""
        if self.part is None or self.part.name in (OPENING, CLOSING):
            return None
        return int(self.part.name)


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """What an answer depends on beside its request, and what names it."""

    number: str
    """Id of the request that has begun it."""
    created: int
    """Time, in seconds since the epoch."""
    nonce: str
    """Random, in the names of what was not to be guessed."""
    seed: int


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """What all ids of a stream share, but for the engine."""

    origin: Origin
    digest: bytes
    engine: str
    """Name of the engine that has generated last."""


@dataclass(frozen=True, slots=True)
class EventId:
    """A parsed ``Last-Event-ID``."""

    origin: Origin
    digest: bytes
    engine: str
    seen: Seen


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


def last_event_id(headers: Sequence[tuple[bytes, bytes]]) -> EventId | None:
    """Return the id of the last event that a client has; raises :class:`ApiError`."""
    for name, value in headers:
        if name == HEADER and value:
            return _parsed(value)
    return None


def _parsed(value: bytes) -> EventId:
    try:
        if len(value) > LONGEST_ID:
            raise ValueError
        head, _, seen = value.decode("ascii").partition(".")
        data = base64.urlsafe_b64decode(head + "=" * (-len(head) % 4))
        found = _decode(data)
        return EventId(found.origin, found.digest, found.engine, _seen(seen))
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise ApiError(
            400,
            f"last-event-id: found {value.decode('latin-1')!r:.80}, accepts the id of "
            "an event of this server; leave it out to begin again",
            code="invalid_value",
        ) from error


def _seen(text: str) -> Seen:
    """Return what a client has; raises :class:`ValueError`."""
    events, places, *parts = text.split(".")
    found = tuple(_place(PLACE.fullmatch(each)) for each in places.split("-"))
    if len(found) > MOST_COMPLETIONS or len(parts) > 1:
        raise ValueError
    part = None
    if parts:
        match = PART.fullmatch(parts[0])
        if match is None:
            raise ValueError
        name, tokens, finished, count = match.groups()
        after = Place(int(tokens or 0), bool(finished))
        part = Part(name, after, int(count))
        if name not in (OPENING, CLOSING) and not (
            int(name) < len(found) and found[int(name)] < after
        ):
            raise ValueError
    return Seen(int(events), found, part)


def _place(match: re.Match[str] | None) -> Place:
    if match is None:
        raise ValueError
    return Place(int(match[1]), bool(match[2]))


class ResumableExchange(ABC):
    """An exchange whose events can have ids."""

    job: Job

    @abstractmethod
    def restore(self, origin: Origin) -> None:
        """Use the names and the time of the request that has begun the answer."""

    @abstractmethod
    def count_from(self, events: int) -> None:
        """Number the next events as those behind so many."""


def name_stream(
    exchange: Exchange,
    scope: Any,
    body: bytes,
    identity: str,
    given: EventId | None,
) -> None:
    """Let the events of a stream have ids, if they can, and go on behind a given one.

    scope: of its HTTP request. identity: digest of what decides which tokens follow a
    prompt; empty if streams end with their connections. Raises :class:`ApiError` 409 if
    the id is that of another request.
    """
    job = exchange.job
    if (
        not identity
        or not isinstance(exchange, ResumableExchange)
        or job.completions > MOST_COMPLETIONS
    ):
        if given is not None:
            raise _other("streams of this server and request have none")
        return
    if given is None:
        seed = job.options.get("seed")
        origin = Origin(
            job.number, int(time.time()), secrets.token_hex(8),
            random_seed() if seed is None else seed,
        )  # fmt: skip
    else:
        origin = given.origin
    told = origin, scope["path"], scope["state"]["owner"], identity
    digest = hashlib.sha256(_encode(told))
    digest.update(body)
    transcript = digest.digest()[:16]
    if given is not None and not (
        given.digest == transcript and len(given.seen.places) == job.completions
    ):
        raise _other("is of another request, API key or model")
    exchange.restore(origin)
    exchange.job = replace(
        job,
        options={**job.options, "seed": origin.seed},
        origin=origin,
        transcript=transcript,
        seen=None if given is None else given.seen,
        engine="" if given is None else given.engine,
    )


def _other(problem: str) -> ApiError:
    return ApiError(
        409,
        f"last-event-id: {problem}; send the same body with the same key to the same "
        "fleet, or leave it out to begin again",
        code="other_stream",
    )


def numbered(exchange: Exchange, generations: Generations) -> StreamWriter:
    """Return what writes the events of a stream, with ids if they can have any."""
    job = exchange.job
    if job.origin is None or not isinstance(exchange, ResumableExchange):
        return exchange
    return NumberedEvents(
        exchange, partial(_head, job.origin, job.transcript, generations), job.seen
    )


def _head(origin: Origin, digest: bytes, generations: Generations) -> str:
    """Return the part of an id that all events of a stream share."""
    return _encoded_head(origin, digest, generations.engine)


@lru_cache(1024)
def _encoded_head(origin: Origin, digest: bytes, engine: str) -> str:
    data = _encode(_Head(origin, digest, engine))
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class NumberedEvents:
    """Writes the events of a stream with ids, but for those that a client has.

    head: returns the common part of the ids. seen: ``None`` if the stream begins.
    """

    def __init__(
        self,
        exchange: Any,
        head: Callable[[], str],
        seen: Seen | None,
    ) -> None:
        self._exchange, self._head, self._seen = exchange, head, seen
        self._places = [Place()] * exchange.job.completions
        self._events = 0

    def opening(self, usage: Usage) -> bytes:
        """Return the events before the first delta."""
        known = 0 if self._seen is None else self._seen.events_of(OPENING)
        self._begin(known)
        data = self._exchange.opening(usage)
        return self._numbered(data, Part(OPENING, Place(), 0), known)

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the events of a delta."""
        before = self._places[index]
        tokens = before.tokens + len(delta.token_ids)
        after = Place(tokens, delta.finish_reason is not None)
        part = Part(str(index), after, 0)
        known: int | None = 0
        if (seen := self._seen) is not None:
            if after <= seen.places[index]:
                known = None
            elif seen.part is not None and seen.part[:2] == part[:2]:
                known = seen.part.events
        self._begin(known)
        data = self._exchange.delta(index, delta, usage)
        return self._numbered(data, part, known, index)

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the events after the last delta."""
        known = 0 if self._seen is None else self._seen.events_of(CLOSING) or 0
        self._begin(known)
        data = self._exchange.closing(answers, usage)
        return self._numbered(data, Part(CLOSING, Place(), 0), known)

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an error in mid-stream, which have no ids."""
        data: bytes = self._exchange.failure(error)
        return data

    def _begin(self, known: int | None) -> None:
        """Let the first part that is sent have the numbers that it had."""
        if self._seen is not None and known is not None and not self._events:
            self._events = self._seen.events - known
            self._exchange.count_from(self._events)

    def _numbered(
        self, data: bytes, part: Part, known: int | None, index: int | None = None
    ) -> bytes:
        """Return events with ids; known: how many the client has, ``None``: all."""
        events = data.split(b"\n\n")[:-1]
        parts = []
        if known is not None:
            for count, event in enumerate(events[:-1], 1):
                place = Seen(self._events + count, tuple(self._places),
                             part._replace(events=count))  # fmt: skip
                parts.append((place, event))
            self._events += len(events)
        if index is not None:
            self._places[index] = part.after
        if known is not None and events:
            rest = None if index is not None else part._replace(events=len(events))
            parts.append((Seen(self._events, tuple(self._places), rest), events[-1]))
        head = self._head()
        return b"".join(
            f"id: {head}.{place}\n".encode() + event + b"\n\n"
            for place, event in parts[known:]
        )
