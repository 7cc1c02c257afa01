"""Formats a benchmark report as text with bars and as a plot."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inl.cli.devices import show_bytes
from inl.errors import MissingPackage, RequestError
from inl.install_command import install_command

BAR = 30
"""Width of the longest bar in characters."""
PHASES = (
    ("prefill", "prefill_tokens_per_second"),
    ("decode", "decode_tokens_per_second"),
)


def show(report: dict[str, Any]) -> str:
    """Format a report as text."""
    lines = [
        f"{report['model']} on {report['device']}, prompts of "
        f"{report['prompt_tokens']} tokens, answers of {report['tokens']}, "
        f"medians of {report['runs']} runs (minimum to maximum)",
        "",
        f"load           {report['load_seconds']:.2f} s",
        f"peak memory    {show_bytes(report['peak_host_bytes']) or 'unknown'}",
        f"bandwidth      {_bandwidth(report['bandwidth'])}",
    ]
    if line := show_device_memory(report["device_memory"]):
        lines.insert(-1, line)
    for row in report["batches"]:
        lines += ["", f"batch {row['batch']}", *_batch(row)]
    if report["repeated"] is not None:
        lines += ["", _repeated(report["repeated"])]
    if (loads := report.get("expert_loads")) is not None:
        lines += ["", _loads(loads)]
    return "\n".join([*lines, "", *_bars(report["batches"])]).rstrip()


def _loads(loads: dict[str, Any]) -> str:
    found = loads["imbalance"]
    return (
        f"experts        most tokens of one of a layer, relative to their mean: "
        f"{min(found):.2f} to {max(found):.2f} ({loads['steps']} steps)"
    )


def _repeated(found: dict[str, Any]) -> str:
    hits = (f"{count} blocks from {tier}" for tier, count in found["hits"].items())
    return (
        f"repeated       first token {found['first_token_seconds']:.3f} s, "
        f"{found['cached_tokens']} tokens cached, {', '.join(hits) or 'none of a tier'}"
    )


def _bandwidth(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "not measured on this device"
    return f"{measured['bytes_per_second'] / 1e9:.1f} GB/s ({measured['how']})"


def _batch(row: dict[str, Any]) -> list[str]:
    first = row["first_token_seconds"]
    lines = [
        f"  first token  {first['median']:.3f} s ({first['least']:.3f} to "
        f"{first['most']:.3f})"
    ]
    for name, key in PHASES:
        rate = row[key]
        text = "not measured: fewer than two full steps; increase --tokens"
        if rate is not None:
            text = (
                f"{rate['median']:.1f} tokens/s ({rate['least']:.1f} to "
                f"{rate['most']:.1f})"
            )
        lines.append(f"  {name:<11}  {text}")
    if row["bytes_per_second"] is not None:
        share = row["share_of_bandwidth"]
        part = "" if share is None else f", {share:.0%} of the bandwidth"
        lines.append(
            f"  moved        {row['bytes_per_token'] / 1e6:.1f} MB per token, "
            f"{row['bytes_per_second'] / 1e9:.1f} GB/s{part}"
        )
    return lines


def _bars(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for name, key in PHASES:
        values = [(row["batch"], row[key]["median"]) for row in rows if row[key]]
        longest = max((value for _, value in values), default=0)
        for batch, value in values:
            bar = "█" * max(1, round(BAR * value / longest))
            label = f"{name}, batch {batch}"
            lines.append(f"{label:<18} {bar:<{BAR}} {value:.1f}")
    return lines


def check_plot(path: Path) -> None:
    """Check that a plot can be written to ``path``.

    Raises :class:`MissingPackage` without matplotlib and :class:`RequestError` for an
    unusable path.
    """
    if find_spec("matplotlib") is None:
        raise MissingPackage(
            f"--plot needs matplotlib; try: {install_command('inl-core[plot]')}"
        )
    known = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in known:
        raise RequestError(
            f"plot: found {str(path)!r:.80}, accepted: a name ending in "
            f"{', '.join(known)}"
        )
    if not path.absolute().parent.is_dir():
        raise RequestError(
            f"plot: found {str(path)!r:.80}, accepted: a file in an existing folder"
        )


def show_device_memory(memory: dict[str, int] | None) -> str:
    """Format the memory of a device of its own; empty for the host's."""
    if memory is None:
        return ""
    used = show_bytes(memory["total"] - memory["free"])
    return f"device memory  {used} of {show_bytes(memory['total'])} in use"


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Plot prefill and decode speed by batch size, with the range over runs."""
    figure, axes = subplots(len(PHASES))
    for axis, (name, key) in zip(axes, PHASES, strict=True):
        rows = [row for row in report["batches"] if row[key]]
        middle = [row[key]["median"] for row in rows]
        below = [row[key]["median"] - row[key]["least"] for row in rows]
        above = [row[key]["most"] - row[key]["median"] for row in rows]
        names = [str(row["batch"]) for row in rows]
        bars = axis.bar(names, middle, yerr=(below, above), capsize=4)
        axis.bar_label(bars, fmt="%.0f", label_type="center", color="white")
        axis.set(title=name, xlabel="batch", ylabel="tokens/s")
    figure.suptitle(f"{report['model']} on {report['device']}")
    save_figure(figure, path)


def subplots(count: int) -> tuple[Any, Any]:
    """Return a figure, which needs no display, and its axes side by side."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    figure, axes = import_module("matplotlib.pyplot").subplots(
        1, count, figsize=(4 * count, 3.5), layout="constrained"
    )
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure; raises :class:`RequestError` if that fails."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RequestError(f"plot: {path}: {error.strerror}") from error
