"""Progress bar for long operations, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inl.weights.loader import Progress

PATIENCE_SECONDS = 0.5
"""Operations shorter than this show no bar."""


def loading_bar(what: str = "loading weights") -> Progress | None:
    """A function to tell (done, total), or ``None`` where nobody looks.

    Where it begins anew, programs are made (:attr:`EngineConfig.warm_up`).
    """
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)
    began = time.perf_counter()
    last = 0

    def tell(done: int, total: int) -> None:
        nonlocal last
        if done < last:
            bar.update(task, description="making programs")
        last = done
        if time.perf_counter() - began > PATIENCE_SECONDS or bar.live.is_started:
            bar.start()
            bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return tell
