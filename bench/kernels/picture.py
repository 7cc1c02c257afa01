"""The table as a picture: each way's share of its row's ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WAYS = {
    "ours": "#c2410c", "compiled": "#64748b", "library": "#0f766e", "plain": "#cbd5e1",
}  # fmt: skip


def check_picture(path: Path) -> None:
    """Exit where no picture can be drawn, before minutes of work."""
    if find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib; try: pip install matplotlib")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SystemExit(f"--plot: found {path}, accepted: .png, .svg or .pdf")


def draw(lines: Sequence[Any], path: Path, title: str) -> None:
    """Four bars a row, the ceiling at 1."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    height = 0.8 / len(WAYS)
    figure, axis = pyplot.subplots(
        figsize=(10, 0.5 * len(lines) + 1.5), layout="constrained"
    )
    for order, (way, color) in enumerate(WAYS.items()):
        for place, line in enumerate(lines):
            seconds = getattr(line, way)
            if seconds:
                at = place + (order - (len(WAYS) - 1) / 2) * height
                axis.barh(at, line.ceiling / seconds, height, color=color)
        axis.barh(0, 0, color=color, label=way)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(
        range(len(lines)), [f"{line.op}\n{line.shape}" for line in lines], fontsize=7
    )
    axis.invert_yaxis()
    axis.set_xlabel("share of the ceiling")
    axis.legend()
    axis.set_title(title, fontsize=9)
    figure.savefig(path, dpi=130)
