"""Four times the capacity for a minute: goodput, memory, rejections and answers.

    python bench/serve_overload.py --seconds 60 --rounds 6
    python bench/serve_overload.py --replicas 2 --keys 8 1

Alternates between the capacity, with as many clients as the server runs and queues, and
Poisson arrivals at four times that rate, so that other processes disturb both alike.
Prints the ratio of medians. ``--keys`` divides the arrivals between keys that send so
many requests each. Keys have no weights: one that asks for less than its equal share is
to get all of it, and the others divide the rest, which is printed as the fair share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from serve_processes import get, post, server

PATH = "/v1/completions"
RAMP = 1.0
"""Seconds until the queue is full."""

TEXTS = [f"Item {number}: the story of" for number in range(16)]


def body(number: int, tokens: int) -> dict[str, Any]:
    """Return a greedy request."""
    fixed = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"prompt": TEXTS[number % len(TEXTS)], "return_token_ids": True, **fixed}


def resident(process: int) -> int:
    """Return the memory of a process in bytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(process: int) -> float:
    """Return the processor time that a process and its children have used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return own + sum(processor_seconds(int(each)) for each in children)


@dataclass(frozen=True)
class Window:
    """What happened in some seconds; processor: the server's processor time."""

    seconds: float
    finished: int
    rejected: int
    processor: float

    @property
    def rate(self) -> float:
        """Finished requests per second."""
        return self.finished / self.seconds


def sum_of(windows: list[Window]) -> Window:
    """Return all windows as one."""
    return Window(*map(sum, zip(*map(astuple, windows), strict=True)))


class Load:
    """Sends requests and counts their answers."""

    def __init__(
        self, host: str, port: int, process: int, tokens: int, keys: Sequence[str]
    ) -> None:
        self._host, self._port, self._tokens = host, port, tokens
        self._keys = keys
        """Those of requests that follow each other, again and again; or none."""
        self.asked: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        """Of each key, while there are more requests than the server can do."""
        self._process = process
        self._is_open = False
        self.counts: Counter[str] = Counter()
        self.wanted: dict[int, Any] = {}

    async def send(self, number: int) -> None:
        """Send a request and count its answer."""
        key = self._keys[number % len(self._keys)] if self._keys else None
        self.asked[key or "all"] += self._is_open
        status, headers, answer = await post(
            self._host, self._port, PATH, body(number, self._tokens), key
        )
        self.counts[str(status)] += 1
        if status == 200:
            self.answers[key or "all"] += self._is_open
            ids = answer["choices"][0]["token_ids"]
            wanted = self.wanted.setdefault(number % len(TEXTS), ids)
            self.counts["differing answers"] += ids != wanted
        else:
            self.counts["without Retry-After"] += "retry-after" not in headers

    async def state(self) -> dict[str, Any]:
        """Return what the server does now."""
        key = self._keys[0] if self._keys else None
        return await get(self._host, self._port, "/load", key)

    async def closed(self, clients: int, seconds: float) -> Window:
        """Measure clients that never pause: the capacity."""
        end = time.perf_counter() + RAMP + seconds

        async def client(number: int) -> None:
            while time.perf_counter() < end:
                await self.send(number)
                number += clients

        load = asyncio.gather(*map(client, range(clients)))
        return await self._watched(load, seconds)

    async def open(self, rate: float, seconds: float) -> Window:
        """Measure Poisson arrivals."""
        draw, began, now = random.Random(1), time.perf_counter(), 0.0
        self._is_open = True
        tasks = []

        async def arrive() -> None:
            nonlocal now
            while now < RAMP + seconds:
                await asyncio.sleep(max(now - (time.perf_counter() - began), 0))
                tasks.append(asyncio.create_task(self.send(len(tasks))))
                now += draw.expovariate(rate)
            await asyncio.gather(*tasks)

        try:
            return await self._watched(arrive(), seconds)
        finally:
            self._is_open = False

    async def _watched(self, load: Awaitable[Any], seconds: float) -> Window:
        """Measure a window within a load, when the queue is full already."""
        task = asyncio.ensure_future(load)
        await asyncio.sleep(RAMP)
        before, cost = self.counts.copy(), processor_seconds(self._process)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        window = Window(
            time.perf_counter() - began,
            self.counts["200"] - before["200"],
            self.counts["503"] - before["503"],
            processor_seconds(self._process) - cost,
        )
        await task
        return window


async def measure(host: str, port: int, process: int, given: Any) -> dict[str, Any]:
    """Alternate between the capacity and four times of it."""
    names = [f"key{at}" for at, count in enumerate(given.keys) for _ in range(count)]
    load = Load(host, port, process, given.tokens, names)
    for number in range(len(TEXTS)):
        await load.send(number)  # unloaded: the wanted answers
    clients = given.batch * (given.replicas or 1) + given.queue
    part = given.seconds / given.rounds
    rounds: dict[str, list[Window]] = {"capacity": [], "overload": []}
    memory = []
    for round_ in range(given.rounds):
        rounds["capacity"].append(await load.closed(clients, part))
        capacity = statistics.median(each.rate for each in rounds["capacity"])
        rounds["overload"].append(await load.open(4 * capacity, part))
        memory.append(resident(process))
        print(f"round {round_ + 1}: capacity {rounds['capacity'][-1].rate:.2f}, at 4 "
              f"times {rounds['overload'][-1].rate:.2f} requests/s")  # fmt: skip
    rates = {k: statistics.median(w.rate for w in found) for k, found in rounds.items()}
    base, over = (sum_of(rounds[name]) for name in rounds)
    each = base.processor / base.finished
    return {
        "capacity": rates["capacity"],
        "at_four_times": rates["overload"],
        "share": rates["overload"] / rates["capacity"],
        "processor_seconds_of_an_answer": each,
        "processor_seconds_of_an_answer_at_four_times": over.processor / over.finished,
        "processor_seconds_of_a_rejection": (over.processor - each * over.finished)
        / max(over.rejected, 1),
        "answers": over.finished,
        "rejections": over.rejected,
        "memory_mb": [size / 2**20 for size in memory],
        "differing_answers": load.counts["differing answers"],
        "without_retry_after": load.counts["without Retry-After"],
        "other_statuses": {
            name: count
            for name, count in load.counts.items()
            if name.isdigit() and name not in ("200", "503")
        },
        "open_requests_after": (await load.state())["server_load"],
        "kv_cache_usage_after": (await load.state()).get("kv_cache_usage"),
        "asked_by_each_key_at_four_times": dict(load.asked),
        "answers_of_each_key_at_four_times": dict(load.answers),
        "fair_shares_of_these_answers": fair_shares(load.asked, load.answers.total()),
    }


def fair_shares(asked: Mapping[str, int], answers: int) -> dict[str, int]:
    """Divide answers: each key gets what it asked for, or as much as any other one."""
    found, left = {}, answers
    for number, key in enumerate(sorted(asked, key=lambda each: asked[each])):
        found[key] = min(asked[key], left // (len(asked) - number))
        left -= found[key]
    return found


def show(found: dict[str, Any]) -> None:
    """Print the figures."""
    for name, value in found.items():
        if name.startswith("processor"):
            text = f"{1000 * value:.2f} ms"
        elif isinstance(value, list):
            text = ", ".join(f"{each:.1f}" for each in value)
        else:
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"{name.replace('_', ' ')}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--queue", type=int, default=16)
    parser.add_argument("--replicas", type=int, help="engines of a fleet")
    parser.add_argument("--keys", type=int, nargs="+", default=[])
    given = parser.parse_args()
    options = ("--max-batch", str(given.batch), "--max-queue", str(given.queue))
    options += ("--device", "cpu", "--context", "512")
    if given.replicas:
        options += ("--replicas", str(given.replicas))
    for at in range(len(given.keys)):
        options += ("--api-key", f"key{at}")
    with server(*options) as (host, port, process):
        found = asyncio.run(measure(host, port, process, given))
    show(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
