"""Loads of a server: requests of many lengths that arrive together or over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine


class Arrival(NamedTuple):
    """A request, and when it arrives."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    seconds: float = 0.0
    """After the start of the load."""

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + self.max_tokens


class Served(NamedTuple):
    """Figures of one run of a load."""

    requests: int
    seconds: float
    tokens: int
    """Generated tokens of all requests."""
    first: list[float]
    """Seconds from each arrival to the first token, ascending."""

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    def first_token(self, share: float) -> float:
        """Return the time to the first token that ``share`` of the requests have."""
        return self.first[min(int(share * len(self.first)), len(self.first) - 1)]


class Draw:
    """Random requests. scale: factor of their number, for slow devices."""

    def __init__(self, vocab: int, scale: float, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab, self._scale = vocab, scale

    def count(self, most: int) -> int:
        """Return a scaled number of requests, at least 1."""
        return max(round(most * self._scale), 1)

    def prompt(self, length: int) -> list[int]:
        """Return random token ids."""
        ids: list[int] = self._rng.integers(0, self._vocab, length).tolist()
        return ids

    def lengths(self, least: int, most: int, count: int) -> list[int]:
        """Return lengths with uniform logarithms."""
        logs = self._rng.uniform(np.log(least), np.log(most), count)
        found: list[int] = np.exp(logs).astype(int).tolist()
        return found

    def sizes(
        self, most: int, prompts: tuple[int, int], outputs: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """Return lengths of prompts and outputs, from the least to the most of each."""
        count = self.count(most)
        lengths = (self.lengths(*each, count) for each in (prompts, outputs))
        return list(zip(*lengths, strict=True))

    def times(self, mean: float, count: int) -> list[float]:
        """Return the times of Poisson arrivals, ``mean`` seconds apart."""
        found: list[float] = self._rng.exponential(mean, count).cumsum().tolist()
        return found


def one(length: int, tokens: int = 1) -> Callable[[Draw], list[Arrival]]:
    """Return a load of one request."""
    return lambda draw: [Arrival(draw.prompt(length), tokens)]


def alike(most: int, length: int, tokens: int) -> Callable[[Draw], list[Arrival]]:
    """Return a load of requests of one size, which arrive together."""

    def make(draw: Draw) -> list[Arrival]:
        return [Arrival(draw.prompt(length), tokens) for _ in range(draw.count(most))]

    return make


def mixed(draw: Draw) -> list[Arrival]:
    """Prompts of 16 to 4,000 tokens with outputs of 16 to 512, greedy and sampled."""
    sizes = draw.sizes(128, (16, 4000), (16, 512))
    return [
        Arrival(draw.prompt(length), tokens, 0.8 * (index % 2))
        for index, (length, tokens) in enumerate(sizes)
    ]


def shared(draw: Draw) -> list[Arrival]:
    """Prompts that share 2,000 tokens."""
    prefix = draw.prompt(2000)
    return [Arrival(prefix + draw.prompt(32), 128) for _ in range(draw.count(256))]


def chats(draw: Draw) -> list[Arrival]:
    """Short prompts and answers."""
    sizes = draw.sizes(1000, (20, 200), (50, 250))
    return [Arrival(draw.prompt(length), tokens, 0.8) for length, tokens in sizes]


def bursts(draw: Draw) -> list[Arrival]:
    """16 prompts at a time, on average two such bursts a second."""
    return [
        Arrival(draw.prompt(600), 100, 0.8, seconds)
        for seconds in draw.times(0.5, draw.count(16))
        for _ in range(16)
    ]


LOADS: dict[str, tuple[str, Callable[[Draw], list[Arrival]]]] = {
    "first-32": ("a prompt of 32 tokens", one(32)),
    "first-512": ("a prompt of 512 tokens", one(512)),
    "first-8000": ("a prompt of 8,000 tokens", one(8000)),
    "first-32000": ("a prompt of 32,000 tokens", one(32_000)),
    "requests-8": ("8 requests of 512 + 128 tokens", alike(8, 512, 128)),
    "requests-32": ("32 requests of 512 + 128 tokens", alike(32, 512, 128)),
    "requests-512": ("512 requests of 512 + 128 tokens", alike(512, 512, 128)),
    "long": ("4 requests of 32,000 + 256 tokens", alike(4, 32_000, 256)),
    "mixed": ("128 requests of mixed lengths", mixed),
    "shared": ("256 requests that share 2,000 tokens", shared),
    "chats": ("1,000 short chats", chats),
    "bursts": ("16 bursts of 16 requests", bursts),
}
"""Name -> description at full scale, and the requests of a run."""


def serve(
    engine: InferenceEngine,
    arrivals: Sequence[Arrival],
    tick: Callable[[], None] = lambda: None,
) -> Served:
    """Serve requests as they arrive, without end tokens. tick: called per request."""
    waiting = sorted(arrivals, key=lambda each: -each.seconds)
    handles: list[tuple[float, Any]] = []
    start = time.perf_counter()
    while waiting or engine.core.has_work:
        now = time.perf_counter() - start
        while waiting and waiting[-1].seconds <= now:
            each = waiting.pop()
            handle = engine.submit(
                each.prompt, max_tokens=each.max_tokens, temperature=each.temperature,
                ignore_eos=True,
            )  # fmt: skip
            handles.append((now - each.seconds, handle))
            tick()
        if engine.core.has_work:
            engine.step()
        elif waiting:
            time.sleep(min(waiting[-1].seconds - now, 0.01))
    seconds = time.perf_counter() - start
    done = [(late, handle.completion()) for late, handle in handles]
    first = sorted(late + each.first_token_seconds for late, each in done)
    return Served(
        len(done), seconds, sum(len(each.token_ids) for _, each in done), first
    )
