"""Clients that mean harm, and what other clients notice of them.

    python bench/red_team.py                       # all attacks
    python bench/red_team.py slow-readers headers --seconds 20 --clients 500

``hostile-grammars`` and ``many-requests`` send ``--requests`` requests and end after
``--seconds`` at the latest:

    python bench/red_team.py hostile-grammars --requests 10000 --seconds 3600
    python bench/red_team.py many-requests --requests 100000 --seconds 3600

Each attack runs in a process of its own against a new server with a tiny model and a
key, which the attack has only where it says so. Meanwhile another client asks for
``/health`` with pauses of 5 ms, each time on a new connection, and a third one, which
has the key, for short completions. Printed are the time of ``/health`` in
milliseconds (p99 and maximum), the longest time for which the server's event loop
computed without a pause and its longest collection of garbage (processor time, see
``loop_stalls.py``), how many completions were answered and their p99, the server's
memory before, at most and after, and its connections at most. An attack passes if every
request of the others was answered, within ``--p99-ms`` and ``--max-ms``, the loop
stalled for less than ``--stall-ms``, and the memory grew by less than ``--memory-mb``.

An attack is a function with ``@attack``; others can be added below.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loop_stalls
import numpy as np
from loop_stalls import Stalls
from serve_processes import server

from inl.testing.tiny import tiny_llama

KEY = "red-team"
HEALTH_PAUSE = 0.005
ASK_PAUSE = 0.05
SETTLE_SECONDS = 6.0
"""Until the server's own limits have ended what an attack left."""

SHORT_LIMITS = ("--receive-seconds", "4", "--send-seconds", "4", "--idle-seconds", "4")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Target:
    """The server of an attack, and the attack's size."""

    host: str
    port: int
    clients: int
    requests: int

    async def connect(self, receive_bytes: int = 1 << 16) -> Connection:
        """Open a connection that buffers few bytes at this end."""
        return await asyncio.open_connection(self.host, self.port, limit=receive_bytes)

    async def swarm(self, client: Callable[[Connection], Awaitable[None]]) -> None:
        """Run ``clients`` clients, each of which connects again when it was refused."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError, EOFError):
                    reader, writer = await self.connect()
                    try:
                        await client((reader, writer))
                    finally:
                        writer.transport.abort()
                await asyncio.sleep(0.01)

        await asyncio.gather(*(one() for _ in range(self.clients)))


Attack = Callable[[Target], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    """Add a function, which runs until it is cancelled, as an attack."""
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function


def request(path: str, *headers: str, length: int | None = None) -> bytes:
    """Return the head of a POST request; length: that of its body, if it has one."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", *headers]
    lines += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


AUTHORIZED = f"authorization: Bearer {KEY}"
CHUNKED = "transfer-encoding: chunked"


async def flood(connection: Connection, head: bytes, part: bytes) -> None:
    """Send a part without end; ends when the server has closed the connection."""
    reader, writer = connection
    writer.write(head)
    answered = asyncio.create_task(reader.read(-1))
    try:
        while not answered.done():
            writer.write(part)
            drained = asyncio.create_task(writer.drain())
            await asyncio.wait([drained, answered], return_when="FIRST_COMPLETED")
            if not drained.done():
                drained.cancel()
            elif drained.exception() is not None:
                break
        await asyncio.wait([answered], timeout=1)
    finally:
        answered.cancel()


async def trickle(connection: Connection, head: bytes) -> None:
    """Send a byte each second, until the server has closed the connection."""
    reader, writer = connection
    writer.write(head)
    while not reader.at_eof():
        writer.write(b"x")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1 << 16), 1)


@attack
async def nothing(_target: Target) -> None:
    """No client does anything: what the machine itself delays."""
    await asyncio.Event().wait()


@attack
async def slow_readers(target: Target) -> None:
    """With a key: clients ask for many long streams and read nothing."""
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "logprobs": 20, "n": 4}).encode()
    head = request("/v1/completions", AUTHORIZED, length=len(data))

    async def client(connection: Connection) -> None:
        _, writer = connection
        writer.transport.pause_reading()
        writer.write(head + data)
        await asyncio.sleep(30)

    await target.swarm(client)


@attack
async def half_bodies(target: Target) -> None:
    """With a key: clients announce a body and send a byte of it each second."""
    paths = ("/tokenize", "/v1/embeddings", "/v1/completions", "/v1/messages")
    heads = [request(each, AUTHORIZED, length=1 << 20) for each in paths]

    async def client(connection: Connection) -> None:
        await trickle(connection, heads[id(connection[0]) // 64 % len(heads)])

    await target.swarm(client)


@attack
async def slow_headers(target: Target) -> None:
    """Clients send a byte of a header each second."""
    await target.swarm(lambda each: trickle(each, b"GET /health HTTP/1.1\r\nx: "))


@attack
async def headers(target: Target) -> None:
    """Clients send headers without end."""
    line = b"x: " + b"a" * 1000 + b"\r\n"
    head = b"GET /health HTTP/1.1\r\n"
    await target.swarm(lambda each: flood(each, head, line * 50))


@attack
async def one_header(target: Target) -> None:
    """Clients send one header without end."""
    head = b"GET /health HTTP/1.1\r\nx: "
    await target.swarm(lambda each: flood(each, head, b"a" * 50_000))


@attack
async def bodies(target: Target) -> None:
    """Clients without a key send bodies."""
    head = request("/v1/completions", length=32 << 20)
    await target.swarm(lambda each: flood(each, head, b"a" * 50_000))


@attack
async def chunked_bodies(target: Target) -> None:
    """Clients without a key send bodies of unknown length."""
    head = request("/v1/completions", CHUNKED)
    await target.swarm(lambda each: flood(each, head, b"1\r\nx\r\n" * 5000))


@attack
async def idle_connections(target: Target) -> None:
    """Clients connect, and send nothing."""

    async def client(connection: Connection) -> None:
        await connection[0].read(1)

    await target.swarm(client)


@attack
async def pipelined(target: Target) -> None:
    """Clients send many requests at once, and read no answer."""
    part = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 1000

    async def client(connection: Connection) -> None:
        _, writer = connection
        writer.transport.pause_reading()
        writer.write(part)
        await asyncio.wait_for(writer.drain(), 5)
        await asyncio.sleep(5)

    await target.swarm(client)


def nested(draw: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema of ``depth`` levels."""
    kind = draw.choice(["object", "array", "anyOf", "allOf", "not"])
    if depth == 0:
        return draw.choice(
            [
                {"type": "string", "pattern": "(a+)+" * draw.randrange(1, 9) + "b"},
                {"type": "string", "minLength": draw.randrange(10**6)},
                {"enum": [draw.random() for _ in range(draw.randrange(1, 400))]},
                {"type": "integer", "multipleOf": 10 ** draw.randrange(12)},
                {"$ref": f"#/$defs/d{draw.randrange(4)}"},
                {"const": "\\" * draw.randrange(2000)},
                {},
            ]
        )
    inner = [nested(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
    if kind == "object":
        named = {f"p{at}": each for at, each in enumerate(inner)}
        return {"type": "object", "properties": named, "required": list(named)}
    if kind == "array":
        return {"type": "array", "items": inner[0], "minItems": draw.randrange(10**5)}
    return {kind: inner[0] if kind == "not" else inner}


def chain(draw: random.Random) -> dict[str, Any]:
    """Return a schema whose definitions refer to one another, up to 60 kB."""
    count = draw.randrange(2, 1500)
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
        | {f"d{count}": {"type": "null"}},
    }


def lark(draw: random.Random) -> str:
    """Return a grammar of many rules, which may be recursive or have no end."""
    names = [f"r{n}" for n in range(draw.randrange(1, 300))]
    words = [*names, '"a"', "/(x|xx)+/", '"b"*', "/[a-z]{1,5000}/", "(", ")", "?"]
    lines = [
        f"{name}: {' '.join(draw.choices(words, k=draw.randrange(1, 12)))}"
        for name in names
    ]
    return "\n".join(["start: r0", *lines])


def hostile_program(draw: random.Random) -> dict[str, Any]:
    """Return the members of a request that bind its answer to a hostile program."""
    kind = draw.randrange(5)
    if kind == 0:
        return {"structured_outputs": {"grammar": lark(draw)}}
    if kind == 1:
        pattern = "(" * draw.randrange(200) + "a*" * draw.randrange(1, 200)
        return {"structured_outputs": {"regex": pattern + ")" * draw.randrange(200)}}
    if kind == 2:
        choices = ["x" * draw.randrange(1, 90) for _ in range(draw.randrange(1, 2000))]
        return {"structured_outputs": {"choice": choices}}
    schema = chain(draw) if kind == 3 else nested(draw, draw.randrange(1, 6))
    schema.setdefault("$defs", {f"d{n}": nested(draw, 1) for n in range(4)})
    form = {"name": "x", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


async def until_sent(
    target: Target, make: Callable[[int], bytes], limit: float
) -> None:
    """Send requests of 8 clients; each number once, up to ``--requests``."""
    numbers, statuses = iter(range(target.requests)), Counter[int]()

    async def client() -> None:
        for number in numbers:
            statuses[await ask(target, make(number), limit)] += 1

    try:
        await asyncio.gather(*(client() for _ in range(8)))
    finally:
        counts = ", ".join(
            f"{count} x {each}" for each, count in statuses.most_common()
        )
        print(f"  sent {statuses.total()}: {counts}", file=sys.stderr, flush=True)


@attack
async def hostile_grammars(target: Target) -> None:
    """With a key: ``--requests`` generated schemas, grammars, patterns and choices."""

    def make(number: int) -> bytes:
        body = {
            "prompt": "a",
            "max_tokens": 2,
            **hostile_program(random.Random(number)),
        }
        return post(body)

    await until_sent(target, make, 60.0)


@attack
async def many_requests(target: Target) -> None:
    """With a key: ``--requests`` short requests of many kinds, some of them wrong."""

    def make(number: int) -> bytes:
        draw = random.Random(number)
        body = {
            "prompt": [draw.randrange(96) for _ in range(draw.randrange(1, 9))],
            "max_tokens": draw.randrange(1, 5),
            "temperature": draw.choice([0, 1, 3, "a"]),
            "n": draw.choice([1, 1, 1, 2]),
            "stream": draw.random() < 0.5,
            "stop": draw.choice([None, "a", ["b", "c"]]),
        }
        return post(body)

    await until_sent(target, make, 60.0)


def post(body: object) -> bytes:
    """Return a completion request with the key, after which the connection closes."""
    data = json.dumps(body).encode()
    head = request("/v1/completions", AUTHORIZED, "connection: close", length=len(data))
    return head + data


def run_attack(name: str, target: Target, seconds: float) -> None:
    """Run an attack for some seconds; called in a process of its own."""

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ATTACKS[name](target), seconds)

    asyncio.run(run())


async def ask(target: Target, data: bytes, limit: float = 60.0) -> int:
    """Return the status of an answer, 0 without one."""
    try:
        async with asyncio.timeout(limit):
            reader, writer = await target.connect()
            try:
                writer.write(data)
                answer = await reader.read(-1)
            finally:
                writer.close()
        return int(answer.split(b" ", 2)[1])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass
class Probe:
    """What another client noticed."""

    seconds: list[float] = field(default_factory=list)
    failures: int = 0

    async def run(self, target: Target, data: bytes, pause: float) -> None:
        """Send a request again and again."""
        while True:
            began = time.perf_counter()
            status = await ask(target, data)
            self.seconds.append(time.perf_counter() - began)
            self.failures += status != 200
            await asyncio.sleep(pause)

    def milliseconds(self, quantile: float) -> float:
        """Return a quantile of the times; 1 is the longest."""
        if not self.seconds:
            return float("inf")
        return float(np.quantile(self.seconds, quantile)) * 1000


@dataclass
class Process:
    """Memory and connections of the server."""

    pid: int
    peak_mb: float = 0.0
    peak_files: int = 0

    @property
    def mb(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    async def watch(self) -> None:
        """Record the peaks."""
        while True:
            self.peak_mb = max(self.peak_mb, self.mb)
            files = sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())
            self.peak_files = max(self.peak_files, files)
            await asyncio.sleep(0.05)


def requests_of_others() -> tuple[bytes, bytes]:
    """Return what the other clients send."""
    close = "connection: close"
    completion = post({"prompt": [1, 2, 3], "max_tokens": 4})
    return b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n%s\r\n\r\n" % close.encode(), (
        completion
    )


@contextlib.asynccontextmanager
async def running(*work: Awaitable[None]) -> AsyncIterator[None]:
    """Run what has no end in the body."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(
    name: str, target: Target, pid: int, stalls: Stalls, given: argparse.Namespace
) -> bool:
    """Run one attack, print its row, and return whether it passes."""
    health, asked, process = Probe(), Probe(), Process(pid)
    get, post = requests_of_others()
    for _ in range(50):  # what the server allocates once
        await ask(target, get)
        await ask(target, post)
    before = process.mb
    stalls.reset()
    attacker = multiprocessing.get_context("spawn").Process(
        target=run_attack, args=(name, target, given.seconds)
    )
    async with running(
        health.run(target, get, HEALTH_PAUSE),
        asked.run(target, post, ASK_PAUSE),
        process.watch(),
    ):
        attacker.start()
        await asyncio.to_thread(attacker.join)
        await asyncio.sleep(SETTLE_SECONDS)
    after = process.mb
    p99, longest = health.milliseconds(0.99), health.milliseconds(1)
    stall, collection = (1000 * each for each in stalls.seconds)
    passes = (
        not (health.failures or asked.failures)
        and p99 <= given.p99_ms
        and longest <= given.max_ms
        and stall <= given.stall_ms
        and after - before <= given.memory_mb
    )
    answered = len(asked.seconds) - asked.failures
    print(
        f"{name:18}{p99:8.1f}{longest:8.1f}{health.failures:7}{stall:8.1f}"
        f"{collection:6.1f}"
        f"{answered:7}/{len(asked.seconds):<6}{asked.milliseconds(0.99):8.0f}"
        f"{before:8.0f}{process.peak_mb:8.0f}{after:8.0f}{process.peak_files:7}"
        f"  {'pass' if passes else 'FAIL'}",
        flush=True,
    )
    return passes


def write_tiny(folder: Path) -> None:
    """Write a model of random weights, whose tokens are bytes."""
    config, arrays = tiny_llama(np.random.default_rng(1), vocab=256)
    head, data = {}, b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array, np.float32).tobytes()
        place = [len(data), len(data) + len(raw)]
        shape = list(array.shape)
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": place}
        data += raw
    text = json.dumps(head).encode()
    file = struct.pack("<Q", len(text)) + text + data
    (folder / "model.safetensors").write_bytes(file)
    (folder / "config.json").write_text(json.dumps(config))
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    model = {"type": "BPE", "vocab": {letters[at]: at for at in range(256)}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = True
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level,
                 "decoder": level, "model": model | {"merges": []}}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--p99-ms", type=float, default=50.0)
    parser.add_argument("--max-ms", type=float, default=500.0)
    parser.add_argument("--stall-ms", type=float, default=50.0)
    parser.add_argument("--memory-mb", type=float, default=64.0)
    parser.add_argument("--frontends", default="0")
    given = parser.parse_args()
    if unknown := set(given.attacks) - set(ATTACKS):
        parser.error(f"found {', '.join(unknown)}; accepts {', '.join(ATTACKS)}")
    options = ["--max-batch", "8", "--max-queue", "1000", "--api-key", KEY]
    options += [*SHORT_LIMITS, "--frontends", given.frontends]
    print(f"{'':18}{'health':>8}{'ms':>8}{'failed':>7}{'loop ms':>8}{'gc':>6}"
          f"{'completions':>14}{'p99 ms':>8}{'MB':>8}{'peak':>8}{'after':>8}"
          f"{'files':>7}")  # fmt: skip
    passed = []
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))
        file = Path(folder, "stalls")
        stalls, program = Stalls(file), (loop_stalls.__file__, str(file))
        for name in given.attacks or ATTACKS:
            with server(folder, *options, program=program) as (host, port, pid):
                target = Target(host, port, given.clients, given.requests)
                row = measure(name, target, pid, stalls, given)
                passed.append(asyncio.run(row))
    raise SystemExit(not all(passed))


if __name__ == "__main__":
    main()
