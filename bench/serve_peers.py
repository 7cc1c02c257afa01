"""``inl serve`` beside llama-server: the same weights, the same streaming clients.

    python bench/serve_peers.py --rounds 5 --json peers.json --plot peers.png

For each number of clients, all servers are started and then measured one after another,
round after round, so that what other processes do hits all alike; the others are idle
meanwhile. Ratios are those of medians. Builds llama-server as ``cpu_peers.py`` does, in
the same cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from peers.catalog import CONVERTER, peer_of
from peers.catalog import select as select_rows
from peers.commands import Failed
from peers.environments import build_portable, environment, is_portable, llama_server
from peers.machine import cpu_name, load_average, usable_cores
from peers.models import Models
from peers.picture import check_picture
from serve_processes import server

from inl.checkpoints.hub.resolve import resolve_model
from inl.serve.load_client import LoadClient, run_load

HERE = Path(__file__).parent
sys.path.append(str(HERE / "peers" / "drivers"))
from run_llama_server import Server  # noqa: E402 - in the folder that was just added

WORDS = ("time", "year", "people", "way", "day", "man", "woman", "life", "child")
PROMPT_WORDS = 48
TOKENS = 64
REQUESTS = {1: 4, 8: 2}
"""Requests of a client in a round, by the number of clients; otherwise 1."""

OURS = "INL"
COLUMNS = {"rate": "tokens/s", "first_ms": "first token, ms"}


class LlamaServer(Server):
    """With its defaults: our server caches prompts too."""

    def _command(self, slots: int) -> list[object]:
        return [each for each in super()._command(slots) if each != "--no-cache-prompt"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


class Peers:
    """The programs and files of all servers. forms: such as ``source`` and ``Q4_0``."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.threads = given.threads
        self.source = resolve_model(given.model)
        self.cache = given.cache.expanduser().absolute()
        rows = {row.mode: row for row in select_rows("llama.cpp")}
        self.rows = [rows[name] for name in given.forms.split(",")]
        peer = peer_of(self.rows[0])
        self.python = environment(
            self.cache, peer.name, peer.requirements, peer.removed
        )
        self.program = llama_server(self.cache, self.python)
        self.files = {row.title: self._file(row, given.converter) for row in self.rows}

    def _file(self, row: Any, converter: Path | None) -> Path:
        if row.model == "source":
            return self.source
        converter = converter or environment(self.cache, "convert", CONVERTER)
        models = Models.of(self.source, self.cache, converter)
        return models.make(row.model, self.python).path

    def check(self) -> None:
        """Build llama-server again if the native build does not run here."""
        try:
            with self.llama(self.source, 1):
                return
        except RuntimeError:
            if is_portable(self.cache):
                raise
        build_portable(self.cache, self.python)

    @contextmanager
    def llama(self, model: Path, clients: int) -> Iterator[str]:
        """Yield the URL of a llama-server."""
        job = {"program": self.program, "model": model, "threads": self.threads}
        running = LlamaServer(job)
        try:
            running.with_slots(clients)
            yield running.url
        finally:
            running.stop()

    @contextmanager
    def inl(self, clients: int) -> Iterator[str]:
        """Yield the URL of our server."""
        batch = ("--max-batch", str(clients), "--context", "512")
        with server(str(self.source), "--device", "cpu", *batch) as (host, port, _):
            yield f"http://{host}:{port}"


def bodies(clients: int, seed: int) -> list[dict[str, Any]]:
    """Return requests that no other round has."""
    draw = random.Random(seed)
    fixed = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    fixed["stream_options"] = {"include_usage": True}
    texts = [
        " ".join(draw.choices(WORDS, k=PROMPT_WORDS))
        for _ in range(clients * REQUESTS.get(clients, 1))
    ]
    return [
        {"messages": [{"role": "user", "content": text}], **fixed} for text in texts
    ]


def measure(url: str, clients: int, seed: int) -> dict[str, float]:
    """Return tokens/s and the median time to the first token in ms."""
    sent = bodies(clients, seed)
    arrivals = [0.0] * len(sent)
    load = run_load(LoadClient(url), sent, arrivals, clients, lambda: None)
    began = time.perf_counter()
    samples = asyncio.run(load)
    seconds = time.perf_counter() - began
    bad = [each for each in samples if each.status != 200 or each.error]
    if bad or any(each.completion_tokens != TOKENS for each in samples):
        raise Failed(f"{url}: {(bad or samples)[0]}")
    firsts = [each.first_token_seconds for each in samples]
    rate = TOKENS * len(samples) / seconds
    return {"rate": rate, "first_ms": 1000 * statistics.median(firsts)}


def play(peers: Peers, clients: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Measure all servers with a number of clients; each round has another order."""
    with ExitStack() as stack:
        urls = {OURS: stack.enter_context(peers.inl(clients))}
        for title, file in peers.files.items():
            urls[title] = stack.enter_context(peers.llama(file, clients))
        found: dict[str, list[dict[str, float]]] = {title: [] for title in urls}
        for round_ in range(rounds + 1):
            order = [*urls][round_ % len(urls) :] + [*urls][: round_ % len(urls)]
            for title in order:
                one = measure(urls[title], clients, seed=1000 * clients + round_)
                if round_:  # the first one warms up
                    found[title].append(one)
        return found


def summed(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return medians, and the ratios of INL's to them."""
    middle = {
        title: {
            name: statistics.median(each[name] for each in rounds) for name in COLUMNS
        }
        for title, rounds in found.items()
    }
    for values in middle.values():
        for name in COLUMNS:
            values[f"{name}_ratio"] = middle[OURS][name] / values[name]
    return middle


def draw(results: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw medians: a panel a column, a group of bars for each number of clients."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    titles = [*next(iter(results.values()))]
    for axis, (name, label) in zip(axes, COLUMNS.items(), strict=True):
        for place, title in enumerate(titles):
            at = [group + place / (len(titles) + 1) for group in range(len(results))]
            heights = [found[title][name] for found in results.values()]
            axis.bar(at, heights, 0.9 / (len(titles) + 1), label=title)
        axis.set_xticks(range(len(results)), [f"{count} clients" for count in results])
        axis.set_title(label)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"Streaming chat, {cpu_name()}, {usable_cores()} cores")
    figure.savefig(path, dpi=130)


def main() -> None:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", help="GGUF file (default: INL's default model)")
    add("--forms", default="source,Q4_0,Q8_0", help="of llama-server's file")
    add("--clients", type=int, nargs="+", default=[1, 8, 32])
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=usable_cores())
    add("--cache", type=Path, default=Path(base) / "inl-peers")
    where = "interpreter with torch, transformers and gguf (default: makes one)"
    add("--converter", type=Path, help=where)
    add("--json", type=Path)
    add("--plot", type=Path)
    given = parser.parse_args()
    if given.plot is not None:
        check_picture(given.plot)
    os.environ["INL_THREADS"] = str(given.threads)
    peers = Peers(given)
    peers.check()
    results, rounds = {}, {}
    for clients in given.clients:
        rounds[clients] = play(peers, clients, given.rounds)
        results[clients] = summed(rounds[clients])
        for title, row in results[clients].items():
            print(
                f"{clients:3} clients  {title:34} {row['rate']:8.1f} tokens/s  "
                f"{row['first_ms']:8.1f} ms  INL: {row['rate_ratio']:.2f} of the rate, "
                f"{row['first_ms_ratio']:.2f} of the time", flush=True,
            )  # fmt: skip
    if given.json is not None:
        about = {"processor": cpu_name(), "threads": given.threads,
                 "load_average": load_average(), "portable": is_portable(peers.cache),
                 "model": peers.source.name, "tokens": TOKENS}  # fmt: skip
        found = {**about, "medians": results, "rounds": rounds}
        given.json.write_text(json.dumps(found, indent=1))
    if given.plot is not None:
        draw(results, given.plot)


if __name__ == "__main__":
    main()
