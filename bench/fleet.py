"""The router of ``inl.fleet`` over thousands of simulated replicas.

    python bench/fleet.py --replicas 10000 --requests 1000000
    python bench/fleet.py --replicas 1000 --requests 100000 --plot fleet.svg
    python bench/fleet.py --lookup

Requests are turns of conversations that begin with one of some system prompts. A
simulated replica computes prompts one after the other, but for the leading blocks that
its cache has, which forgets the least recent ones; then it generates with up to 32
others. Some replicas are slower. The same requests go to the router, round robin, and
to the replica with the fewest open requests. ``--lookup`` prints the time of a look-up
and a choice from 1 to 10,000 replicas, and the memory of the index. Times are those of
the processor, so that other processes count little. ``--plot`` draws the table.
"""

from __future__ import annotations

import argparse
import heapq
import time
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from pathlib import Path
from random import Random
from statistics import quantiles

from peers.picture import check_picture

from inl.fleet.prefix_index import BLOCK_TOKENS, PrefixIndex, block_keys
from inl.fleet.router import HOLDERS, Assignment, Router

TOKEN_SECONDS = 1e-4
"""Time of a prompt token; 10,000 tokens a second."""

STEP_SECONDS = 0.02
PLACES = 32
CACHE_BLOCKS = 512
SLOW_TIMES = 3.0
"""Times that a slow replica takes of a fast one."""

SYSTEMS = 200
"""System prompts, whose use falls as 1 / rank."""

TURNS = 4
"""Turns of a conversation, on average."""


@dataclass(slots=True)
class Turn:
    """A request: arrival, keys of its prompt's blocks, tokens, tokens to generate."""

    at: float
    keys: list[int]
    tokens: int
    output: int


def turns(requests: int, rate: float, seed: int) -> Iterator[Turn]:
    """Yield requests in order of arrival."""
    draw = Random(seed)
    ranks = [1 / (rank + 1) for rank in range(SYSTEMS)]
    systems = [
        [draw.getrandbits(64) for _ in range(draw.randrange(4, 33))] for _ in ranks
    ]
    opened: list[tuple[float, int, list[int]]] = []
    """Next turns of conversations."""
    now, numbers = 0.0, count()
    for _ in range(requests):
        now += draw.expovariate(rate)
        if opened and opened[0][0] <= now:
            _, _, keys = heapq.heappop(opened)
        else:
            keys = list(draw.choices(systems, ranks)[0])
        keys = [*keys, *(draw.getrandbits(64) for _ in range(draw.randrange(1, 9)))]
        output = draw.randrange(32, 257)
        yield Turn(now, keys, len(keys) * BLOCK_TOKENS + draw.randrange(64), output)
        if draw.random() < 1 - 1 / TURNS:
            answer = [draw.getrandbits(64) for _ in range(output // BLOCK_TOKENS)]
            pause = output * STEP_SECONDS + draw.expovariate(1 / 5)
            heapq.heappush(opened, (now + pause, next(numbers), keys + answer))


@dataclass(slots=True)
class Simulated:
    """A replica."""

    slowness: float
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    """When the prompts that it has are computed."""
    running: int = 0
    waiting: deque[tuple[Turn, Assignment | None]] = field(default_factory=deque)

    def cached(self, keys: list[int]) -> int:
        """Return the leading blocks of a prompt that it has, and use them."""
        known = 0
        for key in keys:
            if key not in self.cache:
                break
            known += 1
        for key in reversed(keys):
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        return known


@dataclass(slots=True)
class Result:
    """What a policy has reached."""

    first_seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    choose_seconds: float = 0.0
    most_open: int = 0


class Simulation:
    """One run with one policy: "router", "round robin" or "least load"."""

    def __init__(self, policy: str, options: argparse.Namespace) -> None:
        self.now = 0.0
        self.result = Result()
        self._policy, draw = policy, Random(options.seed)
        self._replicas = [
            Simulated(SLOW_TIMES if draw.random() < options.slow else 1.0)
            for _ in range(options.replicas)
        ]
        self._events: list[tuple[float, int, int, Turn, Assignment | None, bool]] = []
        self._numbers = count()
        self._router = Router(
            PrefixIndex(options.max_blocks), seed=1, clock=lambda: self.now
        )
        self._open = [0] * options.replicas
        self._least: list[tuple[int, float, int]] = []
        self._draw = Random(2)
        for number in range(options.replicas):
            self._router.add(number, PLACES, CACHE_BLOCKS * BLOCK_TOKENS)
            heapq.heappush(self._least, (0, self._draw.random(), number))

    def run(self, options: argparse.Namespace) -> Result:
        """Run all requests to their ends."""
        rate = options.rate * options.replicas
        next_look = 0.5
        for number, turn in enumerate(turns(options.requests, rate, options.seed)):
            self._until(turn.at)
            if turn.at > next_look:
                self._router.notice_slow()
                next_look = turn.at + 0.5
            began = time.thread_time()
            replica, assignment = self._choose(number, turn)
            self.result.choose_seconds += time.thread_time() - began
            self._change(replica, 1)
            each = self._replicas[replica]
            if each.running < PLACES:
                self._start(replica, turn, assignment)
            else:
                each.waiting.append((turn, assignment))
        self._until(float("inf"))
        return self.result

    def _choose(self, number: int, turn: Turn) -> tuple[int, Assignment | None]:
        if self._policy == "round robin":
            return number % len(self._replicas), None
        if self._policy == "least load":
            while True:
                load, _, replica = self._least[0]
                if load == self._open[replica]:
                    return replica, None
                heapq.heappop(self._least)
        choice = self._router.choose(turn.keys, turn.tokens)
        assert choice is not None, "all replicas live"
        begun = self._router.begin(choice[0], turn.keys, turn.tokens, choice[1])
        return choice[0], begun

    def _change(self, replica: int, by: int) -> None:
        self._open[replica] += by
        self.result.most_open = max(self.result.most_open, self._open[replica])
        if self._policy == "least load":
            entry = self._open[replica], self._draw.random(), replica
            heapq.heappush(self._least, entry)

    def _start(self, number: int, turn: Turn, assignment: Assignment | None) -> None:
        replica = self._replicas[number]
        replica.running += 1
        known = min(replica.cached(turn.keys) * BLOCK_TOKENS, turn.tokens - 1)
        self.result.prompt_tokens += turn.tokens
        self.result.cached_tokens += known
        work = (turn.tokens - known) * TOKEN_SECONDS * replica.slowness
        replica.free_at = max(replica.free_at, self.now) + work
        first = replica.free_at + STEP_SECONDS * replica.slowness
        self.result.first_seconds.append(first - turn.at)
        self._push(first, number, turn, assignment, is_first=True)
        end = first + turn.output * STEP_SECONDS * replica.slowness
        self._push(end, number, turn, assignment, is_first=False)

    def _push(
        self, at: float, replica: int, turn: Turn, assignment: Assignment | None,
        *, is_first: bool,
    ) -> None:  # fmt: skip
        event = at, next(self._numbers), replica, turn, assignment, is_first
        heapq.heappush(self._events, event)

    def _until(self, at: float) -> None:
        """Let everything happen up to a time."""
        while self._events and self._events[0][0] <= at:
            self.now, _, number, _, assignment, is_first = heapq.heappop(self._events)
            if is_first:
                if assignment is not None:
                    self._router.record_first(assignment, assignment.cached_tokens)
                continue
            if assignment is not None:
                self._router.end(assignment)
            self._change(number, -1)
            replica = self._replicas[number]
            replica.running -= 1
            if replica.waiting:
                self._start(number, *replica.waiting.popleft())
        if at < float("inf"):
            self.now = at


def simulate(options: argparse.Namespace) -> None:
    """Print a table of all policies, and draw it if that was asked for."""
    title = (
        f"{options.replicas:,} replicas ({options.slow:.0%} slower by "
        f"{SLOW_TIMES:g}), {options.requests:,} requests at "
        f"{options.rate * options.replicas:,.0f}/s"
    )
    print(f"{title}\n")
    figures: dict[str, list[float]] = {}
    print("| policy | cached | first token p50 | p99 | most open | µs a choice |")
    print("|---|---|---|---|---|---|")
    for policy in ("router", "least load", "round robin"):
        found = Simulation(policy, options).run(options)
        cuts = quantiles(found.first_seconds, n=100)
        cached = found.cached_tokens / found.prompt_tokens
        figures[policy] = [100 * cached, cuts[49] * 1e3, cuts[98] * 1e3]
        print(
            f"| {policy} | {cached:.1%} "
            f"| {cuts[49] * 1e3:.0f} ms | {cuts[98] * 1e3:,.0f} ms "
            f"| {found.most_open} "
            f"| {found.choose_seconds / options.requests * 1e6:.1f} |",
            flush=True,
        )
    if options.plot is not None:
        draw(figures, title, options.plot)


def draw(figures: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw a panel for each column, with a bar for each policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    labels = "prompt tokens cached, %", "first token p50, ms", "first token p99, ms"
    figure, axes = pyplot.subplots(
        1, len(labels), figsize=(11, 3), layout="constrained"
    )
    for at, (axis, label) in enumerate(zip(axes, labels, strict=True)):
        heights = [found[at] for found in figures.values()]
        bars = axis.bar([*figures], heights, color=["#c2410c", "#64748b", "#64748b"])
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=8)
        axis.set_title(label, fontsize=9)
        axis.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def look_up(options: argparse.Namespace) -> None:
    """Print times of look-ups, and the memory of the index."""
    print(
        "| replicas | look-up µs | choice µs | record µs | report µs a block | blocks "
        "| bytes a block | if it is reported |\n|---|---|---|---|---|---|---|---|"
    )
    for replicas in (1, 10, 100, 1000, 10_000):
        prompts = [turn.keys for turn in turns(4_000, 200.0, options.seed)]
        told, reported = filled(replicas, prompts, options, PrefixIndex.report)
        began = time.thread_time()
        for number, keys in enumerate(prompts):
            told.index.report(number % replicas, keys)
        report = (time.thread_time() - began) / sum(map(len, prompts)) * 1e6
        router, memory = filled(replicas, prompts, options, PrefixIndex.add)
        blocks = len(router.index)
        find = timed(partial(_find, router), prompts)
        choose = timed(partial(_choose, router), prompts)
        record = timed(partial(_record, router, cycle(range(replicas))), prompts)
        print(
            f"| {replicas:,} | {find:.1f} | {choose:.1f} | {record:.1f} "
            f"| {report:.2f} | {blocks:,} | {memory:.0f} | {reported:.0f} |"
        )
    prompt = list(range(4096))
    seconds = timed(lambda _: block_keys(prompt), [[]] * 1000)
    print(f"\nkeys of a prompt of {len(prompt)} tokens: {seconds:.0f} µs")


def filled(
    replicas: int,
    prompts: list[list[int]],
    options: argparse.Namespace,
    put: Callable[[PrefixIndex, int, list[int]], None],
) -> tuple[Router, float]:
    """Return a router that knows prompts, and the bytes of a block of its index."""
    tracemalloc.start()
    router = Router(PrefixIndex(options.max_blocks))
    for number in range(replicas):
        router.add(number, PLACES, CACHE_BLOCKS * BLOCK_TOKENS)
    before = tracemalloc.get_traced_memory()[0]
    for number, keys in enumerate(prompts):
        put(router.index, number % replicas, keys)
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return router, memory / len(router.index)


def _find(router: Router, keys: list[int]) -> None:
    router.index.candidates(keys, HOLDERS)


def _choose(router: Router, keys: list[int]) -> None:
    router.choose(keys, len(keys) * BLOCK_TOKENS)


def _record(router: Router, replicas: Iterator[int], keys: list[int]) -> None:
    router.index.add(next(replicas), keys)


def timed(call: Callable[[list[int]], object], prompts: list[list[int]]) -> float:
    """Return the median of three runs, in microseconds a call."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        for keys in prompts:
            call(keys)
        found.append((time.thread_time() - began) / len(prompts) * 1e6)
    return sorted(found)[1]


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=4.0, help="a replica, a second")
    parser.add_argument("--slow", type=float, default=0.05, help="share of replicas")
    parser.add_argument("--max-blocks", type=int, default=1 << 22)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--plot", type=Path, help="picture; needs matplotlib")
    options = parser.parse_args()
    if options.plot is not None:
        check_picture(options.plot)
    (look_up if options.lookup else simulate)(options)


if __name__ == "__main__":
    main()
