"""``inl bench serve URL``: measures any OpenAI server under load."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from inl.bounded_json import parse_json
from inl.cli import arguments
from inl.cli.bench import bar
from inl.cli.bench_latencies import save_latencies
from inl.cli.bench_show import check_plot
from inl.cli.table import print_table
from inl.errors import RequestError
from inl.serve.load_client import LoadClient, run_load
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
    burst: Annotated[
        int, typer.Option(help="Requests that arrive at the same time.", min=1)
    ] = 1,
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
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request has failed.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of lengths and arrivals.")] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Send ignore_eos, which some servers refuse, for exact lengths.",
        ),
    ] = True,
    as_json: arguments.Json = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="File for a plot of the latencies, such as load.png."),
    ] = None,
) -> None:
    """Measure the server at URL: latency, throughput, goodput."""
    if plot is not None:
        check_plot(plot)
    rows = (
        _read_trace(trace)
        if trace is not None
        else _rows(random.Random(seed), requests, rate, burst, prompt_words, tokens)
    )
    client = LoadClient(url, api_key, seconds=timeout)
    try:
        name = model or asyncio.run(client.model())
        draw = random.Random(seed + 1)
        bodies = [_body(name, draw, words, count) for _, words, count in rows]
        for body in bodies if not ignore_eos else ():
            del body["ignore_eos"]
        began = time.perf_counter()
        arrivals = [arrival for arrival, _, _ in rows]
        with bar(len(rows)) as tick:
            load = run_load(client, bodies, arrivals, concurrency, tick)
            samples = asyncio.run(load)
    except OSError as error:
        raise RequestError(f"{url}: {error}; start a server there") from error
    limits = (
        None if first_token_ms is None else first_token_ms / 1000,
        None if inter_token_ms is None else inter_token_ms / 1000,
    )
    seconds = time.perf_counter() - began
    found = report(samples, seconds, most_first=limits[0], most_inter=limits[1])
    if plot is not None:
        save_latencies(samples, plot, f"{name} at {url}", limits)
    if as_json:
        print(json.dumps(found))
        return
    _show(found)


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
    draw: random.Random, count: int, rate: float, burst: int, words: str, tokens: str
) -> list[tuple[float, int, int]]:
    now, rows = 0.0, []
    word_range, token_range = _range("prompt-words", words), _range("tokens", tokens)
    for number in range(1, count + 1):
        rows.append((now, draw.randint(*word_range), draw.randint(*token_range)))
        if rate > 0 and number % burst == 0:
            now += draw.expovariate(rate / burst)
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
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = parse_json(line, "trace")
            words, tokens = int(row["prompt_words"]), int(row["tokens"])
            rows.append((float(row["arrival"]), words, tokens))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise RequestError(
                f"{path}, line {number}: {error!r}; accepts an object with arrival, "
                "prompt_words and tokens"
            ) from error
    return rows


def _show(found: dict[str, Any]) -> None:
    names = ("first_token_seconds", "inter_token_seconds", "end_to_end_seconds")
    lines = []
    for name in names:
        values = found[name]
        if values is None:  # such as the time between tokens of answers of one token
            continue
        cells = [f"{key} {1000 * value:.1f} ms" for key, value in values.items()]
        lines.append((name.removesuffix("_seconds").replace("_", " "), *cells))
    print_table([""] * 6, lines)
    print()
    for name in ("requests", "finished", "statuses", "seconds", "requests_per_second",
                 "goodput_requests_per_second", "input_tokens_per_second",
                 "output_tokens_per_second"):  # fmt: skip
        value = found[name]
        shown = f"{value:.2f}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' ')}: {shown}")
    for error in found["errors"]:
        print(f"error: {error}")
