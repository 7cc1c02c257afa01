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

from inl.cli.serve_models import make_server
from inl.config import EngineConfig
from inl.serve.http_server import loop_factory
from inl.serve.settings import ServerConfig
from inl.switch_interval import SHORT_SECONDS, switch_interval

SIZE = 7 << 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"


def filled(head: str, part: str, tail: str) -> bytes:
    """Return a body with a part as often as it fits."""
    count = (SIZE - len(head) - len(tail)) // (len(part) + 1)
    return (head + ",".join([part] * count) + tail).encode()


def text(part: str) -> str:
    """Return a long string as JSON."""
    return f'"{part * (SIZE // len(part))}"'


def keys(count: int) -> str:
    return ",".join(f'"{number}":1' for number in range(count))


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield kind, path and body."""
    user = '{"role":"user","content":"a"}'
    said = f'{{"messages":[{user}],"max_tokens":1,'
    ids = '{"prompt":[1,2],"max_tokens":1,'
    tool = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
    call = '{"id":"a","function":{"name":"f","arguments":"{}"}}'
    yield "long text", CHAT, said.replace('"a"', text("a ")).encode()[:-1] + b"}"
    yield "escapes", CHAT, said.replace('"a"', text(r"\n")).encode()[:-1] + b"}"
    yield "messages", CHAT, filled('{"messages":[', user, "]}")
    yield (
        "10,000 messages",
        CHAT,
        f'{{"messages":[{",".join([user] * 10_000)}]}}'.encode(),
    )
    yield (
        "content parts",
        CHAT,
        filled(
            '{"messages":[{"role":"user","content":[',
            '{"type":"text","text":"a"}',
            "]}]}",
        ),
    )
    yield "tools", CHAT, filled(said + '"tools":[', tool, "]}")
    yield (
        "10,000 tools",
        CHAT,
        f'{said}"tools":[{",".join([tool] * 10_000)}]}}'.encode(),
    )
    yield (
        "tool calls",
        CHAT,
        filled(
            f'{{"messages":[{user},{{"role":"assistant","tool_calls":[', call, "]}]}"
        ),
    )
    yield "lists", CHAT, filled(said + '"metadata":{"a":[', "[]", "]}}")
    yield "160,000 keys", CHAT, f'{said}"metadata":{{{keys(160_000)}}}}}'.encode()
    yield "deep", CHAT, (said + '"metadata":' + '{"a":' * 1_000_000).encode()
    yield "unknown field", CHAT, f'{said}"{"x" * SIZE}":1}}'.encode()
    yield (
        "name like a place",
        CHAT,
        f'{said}"{" - at `$.x" * (SIZE // 10)}":1}}'.encode(),
    )
    yield "token ids", TEXT, filled('{"prompt":[', "1", "]}")
    yield "1,000,000 ids", TEXT, f'{{"prompt":[{"1," * 999_999}1]}}'.encode()
    yield "prompts", TEXT, filled('{"prompt":[', '"a"', "]}")
    yield "prompts of ids", TEXT, filled('{"prompt":[', "[1]", "]}")
    yield (
        "1,000 prompts",
        TEXT,
        f'{{"max_tokens":1,"prompt":[{"[1,2]," * 999}[1]]}}'.encode(),
    )
    yield "stop strings", TEXT, filled(ids + '"stop":[', '"ab"', "]}")
    yield "logit_bias", TEXT, (ids + f'"logit_bias":{{{keys(150_000)}}}}}').encode()
    yield "300 biases", TEXT, (ids + f'"logit_bias":{{{keys(300)}}}}}').encode()
    for name in ("bad_words", "allowed_token_ids", "stop_token_ids"):
        part = '"a"' if name == "bad_words" else "7"
        yield name, TEXT, filled(ids + f'"{name}":[', part, "]}")
    yield "n", TEXT, (ids + '"n":128}').encode()
    yield (
        "logprobs of a prompt",
        TEXT,
        json.dumps(
            {"prompt": [5] * 900, "max_tokens": 1, "logprobs": 5, "echo": True}
        ).encode(),
    )
    wide = {f"p{n}": {"type": "string"} for n in range(2_900)}
    schema = {"type": "object", "properties": wide}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield "wide schema", CHAT, f'{said}"response_format":{json.dumps(given)}}}'.encode()
    choice = json.dumps([f"c{n}" for n in range(9_000)])
    yield "choice", CHAT, f'{said}"structured_outputs":{{"choice":{choice}}}}}'.encode()
    yield "blocks", ANTHROPIC, filled(
        '{"max_tokens":1,"messages":[{"role":"user","content":[',
        '{"type":"text","text":"a"}', "]}]}",
    )  # fmt: skip
    yield (
        "count_tokens",
        "/v1/messages/count_tokens",
        filled('{"messages":[', user, "]}"),
    )
    yield "items", RESPONSES, filled('{"input":[', user, "]}")
    yield (
        "text to tokenize",
        "/tokenize",
        f'{{"prompt":"{"ab " * (SIZE // 3)}"}}'.encode(),
    )
    yield "tokens", "/detokenize", f'{{"tokens":[{"1," * 999_999}1]}}'.encode()
    yield "texts to embed", "/v1/embeddings", filled('{"input":[', '"a"', "]}")
    yield "ids to embed", "/v1/embeddings", filled('{"input":[', "1", "]}")


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
            f"{kind:22} {len(body) / 1e6:6.2f} MB  status {status}  stall "
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
