"""The table as a picture: one panel a column, medians with least to most."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from peers.commands import Failed
from peers.report import COLUMNS, Result


def check_picture(path: Path) -> None:
    """Raise :class:`Failed` where no picture can be drawn, before hours of work."""
    if find_spec("matplotlib") is None:
        raise Failed("--plot needs matplotlib; try: pip install matplotlib")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise Failed(f"--plot: found {path}, accepted: .png, .svg or .pdf")


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw every row that ran; INL in its own color."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [each for each in reversed(results) if each.rounds]
    size = (3 * len(COLUMNS) + 3, 0.4 * len(shown) + 1.6)
    figure, axes = pyplot.subplots(
        1, len(COLUMNS), figsize=size, sharey=True, layout="constrained"
    )
    for axis, column in zip(axes, COLUMNS, strict=True):
        for place, result in enumerate(shown):
            spread = result.spread(column.key)
            if spread is None:
                continue
            below, above = spread.median - spread.least, spread.most - spread.median
            color = "#c2410c" if result.row.peer == "inl" else "#64748b"
            axis.barh(
                place, spread.median, xerr=[[below], [above]], color=color, capsize=2
            )
        way = "less is better" if column.less_is_better else "more is better"
        axis.set_title(f"{column.title}\n{way}", fontsize=9)
    axes[0].set_yticks(range(len(shown)), [each.row.title for each in shown])
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
