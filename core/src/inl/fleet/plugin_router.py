"""Routers of plugins: what they choose from, and what keeps a broken one harmless."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inl.errors import PluginError, message

log = logging.getLogger("inl.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPrompt:
    """A request that needs an engine. Later versions may add fields."""

    tokens: Sequence[int]
    """Prompt; of several prompts the first one."""
    output_tokens: int
    """Tokens that an engine which was lost had generated; 0 of a new request."""
    client: str
    """Which API key asks, such as "key 0"; "anonymous" where none is needed."""
    model: str | None
    """Model or adapter, as the request names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """An engine that takes requests. Later versions may add fields."""

    number: int
    """Of the engine in this server; one that comes back has another one."""
    address: str
    """HOST:PORT."""
    device: str
    """Such as "cuda:0"."""
    places: int
    """Requests that it computes at the same time."""
    open: int
    """Requests that have not finished."""
    queued_tokens: int
    """Prompt tokens that wait there."""
    cached_tokens: int
    """Leading tokens of the prompt in its prefix cache, as far as the server knows."""
    seconds_per_token: float
    """Measured time to the first token by tokens to compute; 0 before the first."""


class Policy(Protocol):
    """What a plugin's router is: called in the event loop, so it must not wait."""

    def choose(
        self, prompt: RoutedPrompt, replicas: Sequence[ReplicaLoad]
    ) -> int | None:
        """Return the number of one of ``replicas``, which are one or more.

        ``None`` leaves the choice to the server's own router. An engine that has
        refused the request is not among them.
        """


class GuardedPolicy:
    """A plugin's router, not asked again once it raises or chooses what is not there.

    Every engine answers a request alike, so that the server's own router takes over.
    """

    def __init__(self, inner: Policy, where: str) -> None:
        self._inner = inner
        self._where = where
        self._failed = False

    def choose(
        self, prompt: RoutedPrompt, replicas: Sequence[ReplicaLoad]
    ) -> ReplicaLoad | None:
        """Return one of ``replicas``, or ``None`` for the server's own choice."""
        if self._failed or not replicas:
            return None
        try:
            number = self._inner.choose(prompt, replicas)
            if number is None:
                return None
            chosen = next((each for each in replicas if each.number == number), None)
            if chosen is None:
                accepted = ", ".join(str(each.number) for each in replicas[:8])
                raise PluginError(
                    f"choose: found {number!r:.40}, accepted: None, or the number of a "
                    f"replica: {accepted}"
                )
        except Exception as error:
            self._failed = True
            log.warning(
                "%s: not asked again, the server chooses engines itself: %s",
                self._where,
                f"{type(error).__name__}: {message(error)}",
            )
            return None
        return chosen
