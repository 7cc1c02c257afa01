"""``inl bench mix``: measures one engine under the loads of a server."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.bench import bar, device_memory
from inl.cli.bench_show import check_plot, save_figure, show_device_memory, subplots
from inl.cli.option_groups import EngineOptions, with_groups
from inl.cli.progress import loading_bar
from inl.cli.table import print_table
from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.traffic_loads import Served


@with_groups
def run(
    *,
    model: arguments.Model = None,
    engine_options: EngineOptions,
    loads: Annotated[
        str, typer.Option(help='Names of loads, such as "mixed,chats", or "all".')
    ] = "all",
    scale: Annotated[
        float, typer.Option(help="Factor of the number of requests of each load.")
    ] = 1.0,
    max_batch: Annotated[
        int | None,
        typer.Option(help="Requests that run at the same time.", min=1),
    ] = None,
    context: arguments.Context = None,
    runs: Annotated[int, typer.Option(help="Measured runs of each load.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of prompts and lengths.")] = 0,
    as_json: arguments.Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot to this file, such as mix.png.")
    ] = None,
) -> None:
    """Measure one engine under many loads. Prints medians."""
    from inl.engine.inference_engine import InferenceEngine

    names = parse_loads(loads)
    if scale <= 0:
        raise RequestError(f"--scale: found {scale}, accepts numbers above 0")
    if plot is not None:
        check_plot(plot)  # fail before minutes of measurement
    config = engine_options.config(max_batch=max_batch, context=context, warm_up=True)
    with InferenceEngine.from_pretrained(
        model, config, progress=loading_bar()
    ) as engine:
        report = measure(engine, names, scale=scale, runs=runs, seed=seed)
    if plot is not None:
        save_plot(report, plot)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    show(report)


def parse_loads(text: str) -> list[str]:
    """Parse names of loads. Raises :class:`~inl.errors.RequestError`."""
    from inl.engine.traffic_loads import LOADS

    names = list(LOADS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in LOADS]
    if unknown:
        raise RequestError(
            f"--loads: found {unknown[0]!r:.40}, accepts all, or of {', '.join(LOADS)}"
        )
    return names


def measure(
    engine: InferenceEngine, names: Sequence[str], *, scale: float, runs: int, seed: int
) -> dict[str, Any]:
    """Run each load once to warm up and ``runs`` times; returns the report."""
    from inl.engine.traffic_loads import LOADS, Draw, serve

    rows, skipped = [], []
    for name in names:
        text, make = LOADS[name]
        draw = Draw(engine.runner.limits.vocab, scale, seed)
        arrivals = make(draw)
        most = max(each.length for each in arrivals)
        if most > engine.context:
            skipped.append({"load": name, "tokens": most, "context": engine.context})
            continue
        with bar((runs + 1) * len(arrivals), name) as tick:
            found = [serve(engine, make(draw), tick) for _ in range(runs + 1)][1:]
        rows.append(_row(name, text, found))
    return {
        "device": engine.device,
        "max_batch": engine.runner.limits.slots - 1,
        "context": engine.context,
        "scale": scale,
        "runs": runs,
        "device_memory": device_memory(engine),
        "loads": rows,
        "skipped": skipped,
    }


def _row(name: str, text: str, found: Sequence[Served]) -> dict[str, Any]:
    rates = [each.rate for each in found]
    return {
        "load": name,
        "text": text,
        "requests": found[0].requests,
        "tokens_per_second": statistics.median(rates),
        "least_tokens_per_second": min(rates),
        "most_tokens_per_second": max(rates),
        "first_token_seconds": {
            f"p{round(100 * share)}": statistics.median(
                each.first_token(share) for each in found
            )
            for share in (0.5, 0.9, 0.99)
        },
    }


def show(report: dict[str, Any]) -> None:
    """Print a report as a table."""
    print(
        f"{report['device']}, {report['max_batch']} sequences, context of "
        f"{report['context']} tokens, scale {report['scale']:g}, medians of "
        f"{report['runs']} runs"
    )
    if line := show_device_memory(report["device_memory"]):
        print(line)
    print()
    rows = [
        (
            row["load"],
            str(row["requests"]),
            f"{row['tokens_per_second']:,.1f}",
            f"{row['least_tokens_per_second']:,.1f} to "
            f"{row['most_tokens_per_second']:,.1f}",
            *(f"{1e3 * value:,.1f}" for value in row["first_token_seconds"].values()),
        )
        for row in report["loads"]
    ]
    heads = ("load", "requests", "tokens/s", "range", "first token ms, p50", "p90")
    print_table((*heads, "p99"), rows)
    for each in report["skipped"]:
        print(
            f"{each['load']}: not run, {each['tokens']} tokens exceed the context of "
            f"{each['context']}"
        )


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Plot tokens per second and the times to the first token, by load."""
    figure, (rates, firsts) = subplots(2)
    rows = report["loads"][::-1]
    names = [row["load"] for row in rows]
    bars = rates.barh(names, [row["tokens_per_second"] for row in rows])
    rates.bar_label(bars, fmt="%.0f")
    rates.set(title="generated tokens/s", xscale="log")
    for share in ("p99", "p50"):
        times = [1e3 * row["first_token_seconds"][share] for row in rows]
        firsts.barh(names, times, label=share)
    firsts.set(title="first token, ms", xscale="log")
    firsts.legend()
    figure.suptitle(f"{report['device']}, {report['max_batch']} sequences")
    save_figure(figure, path)
