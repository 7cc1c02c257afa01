"""Admission: bounds on open requests, and the retry time of rejected ones."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from inl.serve.api_error import ApiError

WINDOW = 64
"""Finished requests from which the drain rate is measured."""

WINDOW_SECONDS = 60.0

MAX_RETRY_SECONDS = 60

FAIR_SECONDS = 10.0
"""Time beyond ``Retry-After`` in which a refused client is expected to try again."""

ASLEEP = 503, "the model is asleep until /wake_up; try again later", "asleep"
"""Status, message and code of the refusal."""

ASLEEP_RETRY_SECONDS = 10
"""Retry time while a model is asleep, since nothing says when it wakes."""


Clients = Counter[str]
"""Open requests of each client, of all models."""


class Ticket:
    """A call to admit: its requests, their tokens, and who sent it."""

    __slots__ = ("client", "has_places", "is_waiting", "requests", "tokens")

    def __init__(self, client: str, requests: int) -> None:
        self.client = client
        self.requests = requests
        self.tokens = 0
        """Prompt tokens of all requests, known once they are encoded."""
        self.is_waiting = True
        """Whether no request has produced a token."""
        self.has_places = True
        """Whether something is computed for it, or waits to be."""


class Admission:
    """Counts open requests of a model. Called by the event loop only.

    max_running: requests that the engine computes at the same time. clients: counts
    that several models share.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_queue: int,
        max_queued_tokens: int,
        max_per_client: int | None = None,
        clients: Clients | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_draining = False
        """Whether the server stops: nothing more is admitted."""
        self.is_asleep = False
        """Whether the model is asleep: nothing is admitted until it wakes."""
        self.open = 0
        """Requests that were admitted and are not computed yet."""
        self.queued_tokens = 0
        """Prompt tokens of the calls that have not produced a token."""
        self.rejected = 0
        self.max_running = max_running
        """Requests that are computed at the same time."""
        self._max_queue = max_queue
        self._max_tokens = max_queued_tokens
        self._max_per_client = max_per_client
        self._clock = clock
        self._clients = Counter[str]() if clients is None else clients
        self._held = Counter[str]()
        """Open requests of each client, of this model."""
        self._refused: dict[str, float] = {}
        """Clients that found no room, and until when they are expected again."""
        self._finished: deque[float] = deque(maxlen=WINDOW)

    @property
    def waiting(self) -> int:
        """Requests that wait to run."""
        return max(self.open - self.max_running, 0)

    def enter(self, ticket: Ticket) -> None:
        """Admit a call; raises :class:`ApiError` 400, 429 or 503."""
        client, requests = ticket.client, ticket.requests
        limit = self.max_running + self._max_queue
        if requests > limit:
            raise ApiError(
                400,
                f"n: found a call of {requests} completions, this server holds {limit}",
                param="n",
            )
        self._check(client, requests)
        if client in self._refused and self._rivals(client):
            self._expect(client)  # it has come again, and others find no room still
        self.open += requests
        self._held[client] += requests
        self._clients[client] += requests

    def has_room(self, client: str) -> bool:
        """Whether a call of one request would be admitted."""
        return self._reason(client, 1) is None

    def check(self, client: str) -> None:
        """Refuse a call that is known to be refused: before its body is read.

        Raises :class:`ApiError` 429 or 503.
        """
        self._check(client, 1)

    def _check(self, client: str, requests: int) -> None:
        if (reason := self._reason(client, requests)) is None:
            return
        error = self._refusal(*reason)
        if error.code == "queue_full":
            self._expect(client)
        raise error

    def _expect(self, client: str) -> None:
        """Keep a share for a client that found no room until it tries again."""
        self._refused[client] = self._clock() + self.retry_seconds + FAIR_SECONDS

    def _rivals(self, client: str) -> set[str]:
        """Return the other clients that found no room lately."""
        now = self._clock()
        for each in [each for each, end in self._refused.items() if end < now]:
            del self._refused[each]
        return self._refused.keys() - {client}

    def check_awake(self) -> None:
        """Raise :class:`ApiError` 503 if the model is asleep."""
        if self.is_asleep:
            raise self._refusal(*ASLEEP)

    def _reason(self, client: str, requests: int) -> tuple[int, str, str] | None:
        """Return status, message and code of a refusal; ``None`` admits."""
        if self.is_draining:
            return 503, "the server is stopping", "draining"
        if self.is_asleep:
            return ASLEEP
        most = self._max_per_client
        if most is not None and self._clients[client] + requests > most:
            text = f"{self._clients[client]} requests of this key are open, accepts "
            return 429, f"{text}{most}; try again later", "rate_limit_exceeded"
        if self.open + requests > self.max_running + self._max_queue:
            text = f"queue: {self.waiting} requests wait, accepts {self._max_queue}; "
            return 503, f"{text}try again later", "queue_full"
        held = self._held[client]
        if held and self.open + requests > self.max_running and self._refused:
            share = self._share(client)
            if held + requests > share:
                text = f"queue: {held} requests of this key are open, its share while "
                text += f"other keys find no room is {share}; try again later"
                return 503, text, "queue_full"
        return None

    def _share(self, client: str) -> int:
        """Return how many requests of a client may be open while some have to wait.

        Clients that find no room divide equally what the others leave.
        """
        wanting = {client, *self._rivals(client)}
        others = sum(self._held[each] for each in self._held.keys() - wanting)
        return (self.max_running + self._max_queue - others) // len(wanting)

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Count the prompt tokens of a call; raises :class:`ApiError` 503.

        Without other calls that wait, any number is accepted.
        """
        if self.queued_tokens and self.queued_tokens + tokens > self._max_tokens:
            raise self._refusal(
                503,
                f"queue: {self.queued_tokens} tokens wait, found {tokens} more, "
                f"accepts {self._max_tokens}; try again later",
                "queue_full",
            )
        ticket.tokens = tokens
        self.queued_tokens += tokens

    def begun(self, ticket: Ticket) -> None:
        """Record that a call has produced a token."""
        if ticket.is_waiting:
            ticket.is_waiting = False
            self.queued_tokens -= ticket.tokens

    def computed(self, ticket: Ticket, *, finished: bool) -> None:
        """Free the places of a call for which nothing is computed any more.

        Its answer may take longer to send. finished: whether it was not aborted.
        """
        if not ticket.has_places:
            return
        ticket.has_places = False
        self.begun(ticket)
        self.open -= ticket.requests
        self._held[ticket.client] -= ticket.requests
        if not self._held[ticket.client]:
            del self._held[ticket.client]
        if finished:
            self._finished.extend([self._clock()] * ticket.requests)

    def leave(self, ticket: Ticket, *, finished: bool) -> None:
        """Record the end of a call; finished: whether it was answered."""
        self.computed(ticket, finished=finished)
        self._clients[ticket.client] -= ticket.requests
        if not self._clients[ticket.client]:
            del self._clients[ticket.client]

    @property
    def drain_rate(self) -> float | None:
        """Requests finished per second, of the last WINDOW in WINDOW_SECONDS.

        ``None`` if none has finished in that time.
        """
        now = self._clock()
        while self._finished and now - self._finished[0] > WINDOW_SECONDS:
            self._finished.popleft()
        if not self._finished:
            return None
        return len(self._finished) / max(now - self._finished[0], 0.1)

    @property
    def retry_seconds(self) -> int:
        """Seconds until the requests that wait now will have started."""
        if self.is_asleep:
            return ASLEEP_RETRY_SECONDS
        rate = self.drain_rate
        if rate is None:
            return 1
        seconds = math.ceil((self.waiting + 1) / rate)
        return min(max(seconds, 1), MAX_RETRY_SECONDS)

    def _refusal(self, status: int, text: str, code: str) -> ApiError:
        self.rejected += 1
        return ApiError(status, text, code=code, retry_after=self.retry_seconds)
