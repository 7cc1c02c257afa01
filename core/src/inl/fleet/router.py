"""Chooses a replica for each prompt: the least predicted time to the first token."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic

from inl.fleet.prefix_index import BLOCK_TOKENS, NONE_BELOW, PrefixIndex

FEW = 8
"""Replicas of which all are compared; of more, holders of the prefix and some others"""

HOLDERS = 6
"""Holders of a prompt's prefix that are compared."""

OTHERS = 2
"""Other replicas, drawn at random, that are compared with them."""

LOAD_FACTOR = 1.25
"""Most open requests of a replica relative to its share, by its speed."""

SPARE_REQUESTS = 2
"""Open requests that a replica may have beyond that."""

FIRST_SECONDS_PER_TOKEN = 1e-3
"""Assumed of a prompt's tokens before anything is measured."""

LEAST_TOKENS = 32
"""Prompts below this many tokens take as long."""

WEIGHT = 0.2
"""Of the newest measurement in an average."""

SAMPLES, LEAST_SAMPLES = 32, 8
"""Newest measurements of a replica, and how many a percentile needs."""

SLOW_PERCENTILE = 0.9

SLOW_FACTOR = 2.0
"""Percentile of a replica, relative to the median one, from which on it is slow."""

ASSUMED_TIER_COSTS = (0.2, 0.5)
"""Time to read a token from host memory and from files, by the time to compute it,
until an engine has measured it."""

LEAST_MEASURED = 3
"""Replicas with percentiles that are compared."""


@dataclass(slots=True, eq=False)
class Load:
    """What is known of a replica's work."""

    places: int
    """Requests that it computes at the same time."""
    is_usable: bool = True
    open: int = 0
    """Requests that have not finished."""
    queued_tokens: int = 0
    """Prompt tokens to compute before those of a new request."""
    seconds_per_token: float = 0.0
    """Measured time to the first token by tokens to compute; 0 before the first."""
    service_seconds: float = 0.0
    """Measured time of a request from its first token to its end."""
    pending: dict[Assignment, None] = field(default_factory=dict)
    """Requests without a token, the oldest first."""
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Newest measurements of ``seconds_per_token``."""
    percentile: float = 0.0
    """90th percentile of the last samples; 0 before there are enough of them."""
    slowness: float = 1.0
    """Times that it takes of a usual replica, if it is slow."""
    prompt_tokens: int = 0
    """Total of the prompts that it has computed."""
    cached_tokens: int = 0
    """Of these, what its cache had."""
    tier_costs: Sequence[float] = ASSUMED_TIER_COSTS
    """Time to read a token of each level below the device, by that to compute it."""
    adapters: Collection[str] = ()
    """Names of the adapters that it has loaded."""


class _Usable:
    """Replicas that may get requests, in a list to draw from."""

    def __init__(self) -> None:
        self.replicas: list[int] = []
        self._positions: dict[int, int] = {}

    def add(self, replica: int) -> None:
        self._positions[replica] = len(self.replicas)
        self.replicas.append(replica)

    def discard(self, replica: int) -> None:
        at = self._positions.pop(replica, None)
        if at is not None:
            last = self.replicas.pop()
            if last != replica:
                self.replicas[at] = last
                self._positions[last] = at


@dataclass(slots=True, eq=False)
class Assignment:
    """A request of a replica."""

    replica: int
    keys: Sequence[int]
    tokens: int
    cached_tokens: int
    """Predicted."""
    began: float
    work: int
    """Prompt tokens to compute until its first token, those of others included."""
    first: float | None = None
    """Time of the first token."""


class Router:
    """Assigns prompts to replicas, which are numbers. Not thread-safe.

    seed: of the draws among many replicas.
    """

    def __init__(
        self,
        index: PrefixIndex | None = None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.index = PrefixIndex() if index is None else index
        self.loads: dict[int, Load] = {}
        self._clock = clock
        self._random = Random(seed)
        self._all = _Usable()
        self._adapted: dict[str, _Usable] = {}
        """Usable replicas that have an adapter, by its name."""
        self._open = 0
        self._measured_seconds = 0.0
        """Average of ``seconds_per_token`` over all replicas' measurements."""
        self._measured: set[int] = set()
        """Replicas with measurements since :meth:`notice_slow` was called."""
        self.prompt_tokens = self.cached_tokens = self.predicted_tokens = 0
        """Totals: of prompts, of those that engines had cached, and predicted."""

    def add(
        self,
        replica: int,
        places: int,
        cache_tokens: int,
        adapters: Collection[str] = (),
    ) -> None:
        """Add a replica, which is usable.

        places: requests that it computes at the same time. cache_tokens: size of its
        prefix cache. adapters: names of those that it has loaded.
        """
        self.loads[replica] = Load(places, adapters=frozenset(adapters))
        self.index.open(replica, cache_tokens // BLOCK_TOKENS)
        self._use(replica)

    def remove(self, replica: int) -> None:
        """Remove a replica, and forget what it has cached."""
        self._leave(replica)
        self._open -= self.loads.pop(replica).open
        self.index.close(replica)

    def set_usable(self, replica: int, usable: bool) -> None:
        """Let a replica get requests, or no more."""
        if usable != self.loads[replica].is_usable:
            (self._use if usable else self._leave)(replica)

    def _use(self, replica: int) -> None:
        load = self.loads[replica]
        load.is_usable = True
        self._all.add(replica)
        for name in load.adapters:
            self._adapted.setdefault(name, _Usable()).add(replica)

    def _leave(self, replica: int) -> None:
        load = self.loads[replica]
        load.is_usable = False
        self._all.discard(replica)
        for name in load.adapters:
            self._adapted[name].discard(replica)

    def report(self, replica: int, keys: Sequence[Iterable[int]]) -> None:
        """Record all blocks that a replica has, in place of what was known of it.

        keys: of each level, see :data:`~inl.fleet.prefix_index.LEVELS`.
        """
        self.index.clear(replica)
        for level, each in enumerate(keys):
            self.index.report(replica, each, level)
        for assignment in self.loads[replica].pending:
            self.index.add(replica, assignment.keys)

    def choose(
        self,
        keys: Sequence[int],
        tokens: int,
        exclude: Collection[int] = (),
        adapter: str = "",
    ) -> tuple[int, int] | None:
        """Return a replica, and the tokens of the prompt that it need not compute.

        Those that it reads from a slower level count less, by the time that this takes.
        keys: of the prompt's blocks. exclude: replicas that refused it. adapter: name
        of the one that it needs, if any. ``None`` if there is no replica.
        """
        best = bounded_best = None
        cost = bounded_cost = 0.0
        for replica, blocks in self._candidates(keys, exclude, adapter).items():
            load = self.loads[replica]
            cached = min(
                blocks * BLOCK_TOKENS - self._reading(replica, load, keys, blocks),
                max(tokens - 1, 0),
            )
            seconds = self._predicted(load, tokens - cached)
            if best is None or seconds < cost:
                best, cost = (replica, cached), seconds
            if self._has_room(load) and (
                bounded_best is None or seconds < bounded_cost
            ):
                bounded_best, bounded_cost = (replica, cached), seconds
        return bounded_best or best

    def _reading(
        self, replica: int, load: Load, keys: Sequence[int], blocks: int
    ) -> int:
        """Return how many tokens could be computed while cached ones are read."""
        below = self.index.below_device(replica, keys, blocks)
        if below is NONE_BELOW:
            return 0
        costs = zip(below, load.tier_costs, strict=True)
        return int(BLOCK_TOKENS * sum(count * min(cost, 1.0) for count, cost in costs))

    def usable(
        self, keys: Sequence[int], exclude: Collection[int], adapter: str = ""
    ) -> dict[int, int]:
        """Return all usable replicas, with the blocks of a prompt that each has."""
        blocks_of = self.index.blocks_of
        return {
            replica: blocks_of(replica, keys)
            for replica in self._usable(adapter)
            if replica not in exclude
        }

    def _usable(self, adapter: str) -> Sequence[int]:
        found = self._adapted.get(adapter) if adapter else self._all
        return () if found is None else found.replicas

    def _candidates(
        self, keys: Sequence[int], exclude: Collection[int], adapter: str
    ) -> dict[int, int]:
        """Return replicas, and the leading blocks of the prompt that each has."""
        usable, index = self._usable(adapter), self.index
        if len(usable) <= FEW:
            return self.usable(keys, exclude, adapter)
        loads = self.loads
        found = {
            replica: index.restorable(replica, keys, blocks)
            for replica, blocks in index.candidates(keys, HOLDERS).items()
            if replica in loads
            and loads[replica].is_usable
            and replica not in exclude
            and (not adapter or adapter in loads[replica].adapters)
        }
        draw = self._random.random
        for _ in range(OTHERS):
            replica = usable[int(draw() * len(usable))]
            if replica not in found and replica not in exclude:
                found[replica] = 0
        if not found:
            return {each: 0 for each in usable if each not in exclude}
        return found

    def _seconds_per_token(self, load: Load) -> float:
        return (
            load.seconds_per_token or self._measured_seconds or FIRST_SECONDS_PER_TOKEN
        )

    def _predicted(self, load: Load, tokens: int) -> float:
        """Return the seconds until the first token of a prompt."""
        work = load.queued_tokens + max(tokens, LEAST_TOKENS)
        waiting = max(load.open + 1 - load.places, 0)
        # Equal ones are divided by their open requests, which share each step.
        crowd = 1 + load.open / (16 * load.places)
        # A usual time says little of a replica that is often late.
        each = max(self._seconds_per_token(load), _late(load))
        seconds = work * each * crowd
        return seconds + waiting * load.service_seconds / load.places

    def _has_room(self, load: Load) -> bool:
        """Whether a replica may get more than its share of the open requests."""
        mean = self._measured_seconds
        speed = mean / load.seconds_per_token if load.seconds_per_token else 1.0
        speed = min(speed, 4.0, 1 / load.slowness)
        share = self._open / max(len(self._all.replicas), 1) * speed
        return load.open < LOAD_FACTOR * share + SPARE_REQUESTS

    def begin(
        self, replica: int, keys: Sequence[int], tokens: int, cached_tokens: int
    ) -> Assignment:
        """Record that a replica got a request."""
        load = self.loads[replica]
        load.open += 1
        self._open += 1
        own = max(tokens - cached_tokens, LEAST_TOKENS)
        load.queued_tokens += own
        assignment = Assignment(
            replica, keys, tokens, cached_tokens, self._clock(), load.queued_tokens
        )
        load.pending[assignment] = None
        self.index.add(replica, keys)
        return assignment

    def record_first(self, assignment: Assignment, cached_tokens: int) -> None:
        """Record the first token of a request, and what its prompt had cached."""
        load = self.loads.get(assignment.replica)
        if load is None or assignment not in load.pending:
            return
        self._start(load, assignment)
        assignment.first = now = self._clock()
        sample = (now - assignment.began) / assignment.work
        load.seconds_per_token = _average(load.seconds_per_token, sample)
        self._measured_seconds = _average(self._measured_seconds, sample)
        load.samples.append(sample)
        self._measured.add(assignment.replica)
        self.predicted_tokens += assignment.cached_tokens
        self.cached_tokens += cached_tokens
        self.prompt_tokens += assignment.tokens
        load.cached_tokens += cached_tokens
        load.prompt_tokens += assignment.tokens

    def _start(self, load: Load, assignment: Assignment) -> None:
        del load.pending[assignment]
        own = max(assignment.tokens - assignment.cached_tokens, LEAST_TOKENS)
        load.queued_tokens -= own

    def end(self, assignment: Assignment) -> None:
        """Record the end of a request, finished or not."""
        load = self.loads.get(assignment.replica)
        if load is None:
            return
        if assignment in load.pending:
            self._start(load, assignment)
        elif assignment.first is not None:
            seconds = self._clock() - assignment.first
            load.service_seconds = _average(load.service_seconds, seconds)
        load.open -= 1
        self._open -= 1

    def notice_slow(self) -> list[int]:
        """Count the time that requests wait already, and compare percentiles.

        Called from time to time. Returns the replicas that have become slow, or are
        slow no longer; see :attr:`Load.slowness`.
        """
        now = self._clock()
        for load in self.loads.values():
            if load.pending:
                oldest = next(iter(load.pending))
                least = (now - oldest.began) / oldest.work
                if least > 2 * self._seconds_per_token(load):
                    load.seconds_per_token = least
        return self._compare() if self._measured else []

    def _compare(self) -> list[int]:
        """Compare the percentiles of replicas, of which some are new."""
        for replica in self._measured:
            load = self.loads.get(replica)
            if load is not None and len(load.samples) >= LEAST_SAMPLES:
                ordered = sorted(load.samples)
                load.percentile = ordered[int(SLOW_PERCENTILE * len(ordered))]
        self._measured.clear()
        found = sorted(each.percentile for each in self.loads.values() if each.samples)
        found = found[bisect_right(found, 0.0) :]
        if len(found) < LEAST_MEASURED:
            return []
        usual, changed = found[(len(found) - 1) // 2], []
        for replica, load in self.loads.items():
            times = load.percentile / usual
            slowness = times if times >= SLOW_FACTOR else 1.0
            if (slowness > 1) != (load.slowness > 1):
                changed.append(replica)
            load.slowness = slowness
        return changed


def _late(load: Load) -> float:
    """Return the time of a token of a slow replica that is late; 0 of others."""
    return load.percentile if load.slowness > 1 else 0.0


def _average(before: float, sample: float) -> float:
    return sample if not before else before + WEIGHT * (sample - before)
