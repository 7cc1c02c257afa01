"""Longest stall of the server's event loop while it reads a hostile body, by kind.

    python bench/hostile_bodies.py --rounds 3

Bodies have up to the default of ``--max-body``. A task of the loop wakes every
millisecond; its longest gap is the stall, of which the shortest of all rounds is shown:
other programs of this machine only add to it. ``memory`` is the growth of the process's
greatest size. Exits with 1 if a stall is above ``--limit`` milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from inl.bounded_json import VALUE_BYTES
from inl.cli.serve_models import make_server
from inl.config import EngineConfig
from inl.serve.dialect import MAX_MEMORY
from inl.serve.http_server import loop_factory
from inl.serve.settings import ServerConfig
from inl.switch_interval import SHORT_SECONDS, switch_interval

SIZE = 7 << 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
A = '"a"'
ACCEPTED = MAX_MEMORY - (1 << 20)
"""Bytes that the values of a body may take."""


def filled(head: str, part: str, tail: str, count: int) -> bytes:
    """Return a body with a part many times."""
    return (head + ",".join([part] * count) + tail).encode()


def text(part: str) -> str:
    """Return a long string as JSON."""
    return f'"{part * (SIZE // len(part))}"'


def keys(count: int) -> str:
    return ",".join(f'"{number}":1' for number in range(count))


USER = '{"role":"user","content":"a"}'
SAID = f'{{"messages":[{USER}],"max_tokens":1,'
IDS = '{"prompt":[1,2],"max_tokens":1,'
FUNCTION = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
CALL = '{"id":"a","function":{"name":"f","arguments":"{}"}}'
PART = '{"type":"text","text":"a"}'
TURN = '{"messages":[{"role":"user","content":['
CALLED = f'{{"messages":[{USER},{{"role":"assistant","tool_calls":['

REPEATED = {
    "messages": (CHAT, '{"messages":[', USER, "]}"),
    "content parts": (CHAT, TURN, PART, "]}]}"),
    "tools": (CHAT, SAID + '"tools":[', FUNCTION, "]}"),
    "tool calls": (CHAT, CALLED, CALL, "]}]}"),
    "lists": (CHAT, SAID + '"metadata":{"a":[', "[]", "]}}"),
    "objects": (CHAT, SAID + '"metadata":{"a":[', "{}", "]}}"),
    "token ids": (TEXT, '{"prompt":[', "1", "]}"),
    "prompts": (TEXT, '{"prompt":[', '"a"', "]}"),
    "prompts of ids": (TEXT, '{"prompt":[', "[1]", "]}"),
    "stop strings": (TEXT, IDS + '"stop":[', '"ab"', "]}"),
    "bad words": (TEXT, IDS + '"bad_words":[', '"a"', "]}"),
    "allowed_token_ids": (TEXT, IDS + '"allowed_token_ids":[', "7", "]}"),
    "stop_token_ids": (TEXT, IDS + '"stop_token_ids":[', "7", "]}"),
    "blocks": (ANTHROPIC, '{"max_tokens":1,' + TURN[1:], PART, "]}]}"),
    "count_tokens": (COUNT, '{"messages":[', USER, "]}"),
    "items": (RESPONSES, '{"input":[', USER, "]}"),
    "tokens": ("/detokenize", '{"tokens":[', "1", "]}"),
    "texts to embed": ("/v1/embeddings", '{"input":[', '"a"', "]}"),
    "ids to embed": ("/v1/embeddings", '{"input":[', "1", "]}"),
}
"""Kind -> path, and the beginning, the repeated part and the end of a body."""


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield kind, path and body; of repeated parts the largest, and the largest whose
    values the server's decoder accepts."""
    for kind, (path, head, part, tail) in REPEATED.items():
        yield kind, path, filled(head, part, tail, SIZE // (len(part) + 1))
        costs = VALUE_BYTES.items()
        memory = sum((part + ",").count(mark.decode()) * each for mark, each in costs)
        yield f"{kind}, accepted", path, filled(head, part, tail, ACCEPTED // memory)
    yield "10,000 messages", CHAT, filled('{"messages":[', USER, "]}", 10_000)
    yield "10,000 tools", CHAT, filled(SAID + '"tools":[', FUNCTION, "]}", 10_000)
    yield (
        "1,000 prompts",
        TEXT,
        filled('{"max_tokens":1,"prompt":[', "[1,2]", "]}", 1000),
    )
    yield "long text", CHAT, f"{SAID.replace(A, text('a '))[:-1]}}}".encode()
    yield "escapes", CHAT, f"{SAID.replace(A, text(chr(92) + 'n'))[:-1]}}}".encode()
    yield "code", CHAT, f"{SAID.replace(A, text('{a:[b,c]} '))[:-1]}}}".encode()
    yield "text to tokenize", "/tokenize", f'{{"prompt":{text("ab ")}}}'.encode()
    yield "keys", CHAT, f'{SAID}"metadata":{{{keys(180_000)}}}}}'.encode()
    yield "deep", CHAT, (SAID + '"metadata":' + '{"a":' * 1_000_000).encode()
    yield "unknown field", CHAT, f"{SAID}{text('x')}:1}}".encode()
    yield "name like a place", CHAT, f"{SAID}{text(' - at `$.x')}:1}}".encode()
    yield "logit_bias", TEXT, f'{IDS}"logit_bias":{{{keys(180_000)}}}}}'.encode()
    yield "300 biases", TEXT, f'{IDS}"logit_bias":{{{keys(300)}}}}}'.encode()
    yield "n", TEXT, f'{IDS}"n":128}}'.encode()
    scored = {"prompt": [5] * 900, "max_tokens": 1, "logprobs": 5, "echo": True}
    yield "logprobs of a prompt", TEXT, json.dumps(scored).encode()
    wide = {f"p{n}": {"type": "string"} for n in range(2_900)}
    schema = {"type": "object", "properties": wide}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield "wide schema", CHAT, f'{SAID}"response_format":{json.dumps(given)}}}'.encode()
    choice = json.dumps([f"c{n}" for n in range(9_000)])
    yield "choice", CHAT, f'{SAID}"structured_outputs":{{"choice":{choice}}}}}'.encode()


async def send(app: Any, path: str, body: bytes) -> int:
    """Return the status of an answer of the application."""
    parts = [{"type": "http.request", "body": body}]
    status = 0

    async def receive() -> Any:
        if parts:
            return parts.pop()
        return await asyncio.Event().wait()

    async def on(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    headers = [(b"host", b"localhost")]
    await app({**scope, "headers": headers, "root_path": ""}, receive, on)
    return status


async def stall(app: Any, path: str, body: bytes) -> tuple[float, int, float]:
    """Return the longest gap, the status and the time of a request."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        latest = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, latest = max(longest, now - latest), now

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    status = await send(app, path, body)
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.01)
    watcher.cancel()
    return longest, status, seconds


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


async def measure(app: Any, rounds: int, only: str) -> float:
    """Print the stalls of all kinds; returns the longest one in milliseconds."""
    worst = 0.0
    for kind, path, body in bodies():
        if only not in kind:
            continue
        before = peak()
        found = [await stall(app, path, body) for _ in range(rounds)]
        gap, status, seconds = min(found)
        worst = max(worst, 1000 * gap)
        print(
            f"{kind:28} {len(body) / 1e6:6.2f} MB  status {status}  stall "
            f"{1000 * gap:7.1f} ms  answer {seconds:6.2f} s  memory "
            f"{peak() - before:5} MB",
            flush=True,
        )
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=50.0)
    parser.add_argument("--only", default="", help="Part of the kind's name.")
    parser.add_argument("--model", default=None)
    given = parser.parse_args()
    config = ServerConfig()
    engine = EngineConfig(warm_up=True, max_batch=4)
    with (
        make_server([("model", given.model)], config, engine) as server,
        switch_interval(SHORT_SECONDS),
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        worst = runner.run(measure(server.app, given.rounds, given.only))
    print(f"longest stall: {worst:.1f} ms")
    sys.exit(worst > given.limit)


if __name__ == "__main__":
    main()
