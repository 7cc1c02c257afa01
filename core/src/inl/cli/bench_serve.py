"""``inl bench serve URL``: measures any OpenAI server under load."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.bench import bar
from inl.cli.table import print_table
from inl.errors import RequestError
from inl.serve.load_client import LoadClient, Sample, run_load
from inl.serve.load_report import report

WORDS = ("time", "year", "people", "way", "day", "man", "woman", "life", "child")


def run(
    url: Annotated[str, typer.Argument(help="Server, such as http://127.0.0.1:8000.")],
    model: Annotated[
        str | None, typer.Option(help="Model. [default: the server's first]")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server.")] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 64,
    rate: Annotated[
        float, typer.Option(help="Poisson arrivals per second; 0 sends all at once.")
    ] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Most open requests.", min=1)] = 1
    << 16,
    prompt_words: Annotated[
        str, typer.Option(help="Words of a prompt: a number, or a range A-B.")
    ] = "64",
    tokens: Annotated[
        str, typer.Option(help="Generated tokens: a number, or a range A-B.")
    ] = "64",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines of arrival (s), prompt_words and tokens, in place of all."
        ),
    ] = None,
    first_token_ms: Annotated[
        float | None, typer.Option(help="Goodput: most time to the first token.")
    ] = None,
    inter_token_ms: Annotated[
        float | None, typer.Option(help="Goodput: most mean time between tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and arrivals.")] = 0,
    as_json: arguments.Json = False,
) -> None:
    """Measure the server at URL: latencies, throughput and goodput."""
    rows = (
        _read_trace(trace)
        if trace is not None
        else _rows(random.Random(seed), requests, rate, prompt_words, tokens)
    )
    client = LoadClient(url, api_key)
    began = time.perf_counter()
    try:
        samples = asyncio.run(_measure(client, model, rows, concurrency, seed))
    except OSError as error:
        raise RequestError(f"{url}: {error}; start a server there") from error
    found = report(
        samples,
        time.perf_counter() - began,
        most_first=first_token_ms and first_token_ms / 1000,
        most_inter=inter_token_ms and inter_token_ms / 1000,
    )
    if as_json:
        print(json.dumps(found))
        return
    _show(found)


async def _measure(
    client: LoadClient,
    model: str | None,
    rows: list[tuple[float, int, int]],
    concurrency: int,
    seed: int,
) -> list[Sample]:
    name = model or await client.model()
    draw = random.Random(seed + 1)
    bodies = [_body(name, draw, words, count) for _, words, count in rows]
    with bar(len(rows)) as tick:
        arrivals = [arrival for arrival, _, _ in rows]
        return await run_load(client, bodies, arrivals, concurrency, tick)


def _body(model: str, draw: random.Random, words: int, tokens: int) -> dict[str, Any]:
    text = " ".join(draw.choices(WORDS, k=words))
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _rows(
    draw: random.Random, count: int, rate: float, words: str, tokens: str
) -> list[tuple[float, int, int]]:
    now, rows = 0.0, []
    word_range, token_range = _range("prompt-words", words), _range("tokens", tokens)
    for _ in range(count):
        rows.append((now, draw.randint(*word_range), draw.randint(*token_range)))
        now += draw.expovariate(rate) if rate > 0 else 0.0
    return rows


def _range(name: str, text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high:
        raise RequestError(f"--{name}: found {text!r:.40}, accepts 64 or 16-128")
    return low, high


def _read_trace(path: Path) -> list[tuple[float, int, int]]:
    rows = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            words, tokens = int(row["prompt_words"]), int(row["tokens"])
            rows.append((float(row["arrival"]), words, tokens))
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{path}, line {number}: {error!r}; accepts an object with arrival, "
                "prompt_words and tokens"
            ) from error
    return rows


def _show(found: dict[str, Any]) -> None:
    names = ("first_token_seconds", "inter_token_seconds", "end_to_end_seconds")
    lines = []
    for name in names:
        values = found[name] or {}
        cells = [f"{1000 * value:.1f}" for value in values.values()]
        lines.append((name.removesuffix("_seconds").replace("_", " "), *cells))
    print_table(("ms", "mean", "p50", "p90", "p95", "p99"), lines)
    print()
    for name in ("requests", "finished", "statuses", "seconds", "requests_per_second",
                 "goodput_requests_per_second", "input_tokens_per_second",
                 "output_tokens_per_second"):  # fmt: skip
        value = found[name]
        shown = f"{value:.2f}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' ')}: {shown}")
    for error in found["errors"]:
        print(f"error: {error}")
