"""Progress bar for long operations, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from inl.progress import LoadStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as Bar

    from inl.progress import Progress

PATIENCE_SECONDS = 0.5
"""Operations shorter than this show no bar."""
LARGE_BYTES = 256 << 20
"""Packing this many bytes takes seconds: the bar appears without delay."""

_bars: list[Bar] = []


def stop_bars() -> None:
    """Stop every bar, also after an exception: a live bar hides the cursor."""
    while _bars:
        _bars.pop().stop()


def counting_bar(label: str) -> Callable[[int, int, str], None] | None:
    """Return a callback that draws a bar of files; ``None`` without a terminal."""
    bar = loading_bar(label)
    if bar is None:
        return None
    return lambda done, total, name: bar(done, total, LoadStage.LOADING)  # noqa: ARG005


def loading_bar(label: str | None = None) -> Progress | None:
    """Return a progress callback that draws a bar; ``None`` without a terminal.

    label: description of the bar; by default that of the stage of each report.
    """
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import Progress as Bar

    stop_bars()
    bar = Bar(console=Console(stderr=True), transient=True)
    _bars.append(bar)
    task = bar.add_task(label or LoadStage.LOADING, total=None)
    began = time.perf_counter()
    current = LoadStage.LOADING

    def report(done: int, total: int, stage: LoadStage = current, /) -> None:
        nonlocal current
        if stage is not current:
            current = stage
            bar.reset(task, description=label or stage)
        waited = time.perf_counter() - began > PATIENCE_SECONDS
        slow = stage is LoadStage.PACKING and total >= LARGE_BYTES
        if waited or slow or bar.live.is_started:
            bar.start()
            bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return report
