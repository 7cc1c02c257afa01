"""Four times the capacity for a minute: goodput, memory, rejections and answers.

    python bench/serve_overload.py --seconds 60

The capacity is measured before and after, with as many clients as the server runs and
queues.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from serve_processes import post, server

PATH = "/v1/completions"
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
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Load:
    """Sends requests and counts their answers."""

    def __init__(self, host: str, port: int, tokens: int) -> None:
        self._host, self._port, self._tokens = host, port, tokens
        self.counts: Counter[str] = Counter()
        self.wanted: dict[int, Any] = {}

    async def send(self, number: int) -> None:
        """Send a request and count its answer."""
        status, headers, answer = await post(
            self._host, self._port, PATH, body(number, self._tokens)
        )
        self.counts[str(status)] += 1
        if status == 200:
            ids = answer["choices"][0]["token_ids"]
            wanted = self.wanted.setdefault(number % len(TEXTS), ids)
            self.counts["differing answers"] += ids != wanted
        else:
            self.counts["without Retry-After"] += "retry-after" not in headers

    async def closed(self, clients: int, seconds: float) -> float:
        """Return the finished requests per second of clients that never pause."""
        end, before = time.perf_counter() + seconds, self.counts["200"]

        async def client(number: int) -> None:
            while time.perf_counter() < end:
                await self.send(number)
                number += clients

        began = time.perf_counter()
        await asyncio.gather(*map(client, range(clients)))
        return (self.counts["200"] - before) / (time.perf_counter() - began)

    async def open(self, rate: float, seconds: float) -> float:
        """Return the requests per second that finish while Poisson arrivals come."""
        draw, before = random.Random(1), self.counts["200"]
        began, number, now = time.perf_counter(), 0, 0.0
        tasks = []
        while now < seconds:
            await asyncio.sleep(max(now - (time.perf_counter() - began), 0))
            tasks.append(asyncio.create_task(self.send(number)))
            number, now = number + 1, now + draw.expovariate(rate)
        rate = (self.counts["200"] - before) / (time.perf_counter() - began)
        await asyncio.gather(*tasks)
        return rate


async def measure(host: str, port: int, process: int, given: Any) -> None:
    load = Load(host, port, given.tokens)
    for number in range(len(TEXTS)):
        await load.send(number)  # unloaded: the wanted answers
    clients, part = given.batch + given.queue, given.seconds / 3
    times = [processor_seconds(process)]
    first = await load.closed(clients, part)
    times.append(processor_seconds(process))
    finished = load.counts["200"] - len(TEXTS)
    load.counts.clear()
    before = resident(process)
    rate = await load.open(4 * first, given.seconds)
    times.append(processor_seconds(process))
    grown = (resident(process) - before) / 2**20
    counts = dict(load.counts)
    # Again: other processes may have changed it.
    second = await load.closed(clients, part)
    share = 2 * rate / (first + second)
    print(f"capacity: {first:.2f} requests/s before, {second:.2f} after")
    print(f"at 4 times: {rate:.2f} requests/s, {share:.3f} of the capacity")
    costs = (times[1] - times[0]) / finished, (times[2] - times[1]) / counts["200"]
    print(
        "processor time of an answer: {:.3f} s before, {:.3f} s at 4 times, "
        "{:.3f} of it".format(*costs, costs[0] / costs[1])
    )
    print(f"memory: {before / 2**20:.0f} MB before, {grown:+.1f} MB after")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--queue", type=int, default=16)
    given = parser.parse_args()
    options = ("--max-batch", str(given.batch), "--max-queue", str(given.queue))
    options += ("--device", "cpu", "--context", "512")
    with server(*options) as (host, port, process):
        asyncio.run(measure(host, port, process, given))


if __name__ == "__main__":
    main()
