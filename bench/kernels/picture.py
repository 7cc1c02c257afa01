"""Plot of the table: time of each implementation relative to the Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WAYS = {
    "plain": ("torch", "o", "#94a3b8"),
    "compiled": ("torch.compile", "s", "#475569"),
    "library": ("library", "D", "#0f766e"),
    "ceiling": ("ceiling", "|", "#000000"),
}
"""Fields of a line: name, mark and color."""

SHOWN = 0.02, 60
"""Range of relative times: a ceiling far below the time of a launch is omitted."""

TALL = 52
"""Rows per column."""


def check_picture(path: Path) -> None:
    """Exit early where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib; try: pip install matplotlib")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SystemExit(f"--plot: found {path}, accepted: .png, .svg or .pdf")


def draw(lines: Sequence[Any], path: Path, title: str) -> None:
    """Plot a mark per implementation, the kernel at 1; slower rows are red."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    count = max(-(-len(lines) // TALL), 1)
    tall = -(-len(lines) // count)
    figure, axes = pyplot.subplots(
        1, count, figsize=(7.2 * count, 0.21 * tall + 1.2), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for column, axis in enumerate(axes[0]):
        _column(axis, lines[column * tall : (column + 1) * tall])
    axes[0][0].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"Time beside our kernel's: {title}", fontsize=9)
    figure.savefig(path, dpi=75)


def _column(axis: Any, lines: Sequence[Any]) -> None:
    for field, (name, mark, color) in WAYS.items():
        known = [
            (getattr(line, field) / line.ours, place)
            for place, line in enumerate(lines)
            if line.ours and getattr(line, field)
        ]
        across, up = zip(*known, strict=True) if known else ((), ())
        size = 60 if field == "ceiling" else 14
        axis.scatter(across, up, size, color, mark, label=name, zorder=2)
    axis.axvline(1, color="#c2410c", linewidth=1.2, zorder=1)
    axis.set_xscale("log")
    axis.set_xlim(*SHOWN)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.grid(axis="both", color="#e2e8f0", zorder=0)
    labels = [f"{line.op}  {line.shape}" for line in lines]
    axis.set_yticks(range(len(lines)), labels, fontsize=7)
    for text, line in zip(axis.get_yticklabels(), lines, strict=True):
        others = [line.plain, line.compiled, line.library]
        if line.ours and any(other and other < line.ours for other in others):
            text.set_color("#c2410c")
    axis.set_xlabel("times our kernel's time (log); red names lose to another way")
