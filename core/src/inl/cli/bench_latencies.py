"""Plots the latencies that ``inl bench serve`` measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inl.cli.bench_show import save_figure, subplots

if TYPE_CHECKING:
    from inl.serve.load_client import Sample


def save_latencies(
    samples: Sequence[Sample],
    path: Path,
    title: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> None:
    """Plot the share of requests within each latency.

    limits: seconds to the first token and between tokens, drawn as lines.
    """
    finished = [each for each in samples if not each.error and each.token_times]
    inters = [each.inter_token_seconds for each in finished]
    panels = (
        ("to the first token", [each.first_token_seconds for each in finished]),
        ("between tokens", [each for each in inters if each is not None]),
        ("to the end", [each.seconds for each in finished]),
    )
    figure, axes = subplots(len(panels))
    for axis, (name, values), limit in zip(axes, panels, (*limits, None), strict=True):
        shares = [100 * (at + 1) / len(values) for at in range(len(values))]
        axis.step([1000 * value for value in sorted(values)], shares, where="post")
        if limit is not None:
            axis.axvline(1000 * limit, linestyle="--", color="#c2410c")
        axis.set(title=name, xlabel="ms", ylabel="requests, %", ylim=(0, 102))
    figure.suptitle(title)
    save_figure(figure, path)
