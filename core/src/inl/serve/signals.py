"""Signals that stop a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def handle_signals(stop: Callable[[], None]) -> None:
    """Call ``stop`` at SIGTERM and SIGINT; called by the main thread's event loop.

    On Windows also at SIGBREAK, which Ctrl-Break and the end of a session raise.
    """
    loop = asyncio.get_running_loop()

    def stop_soon(_number: int, _frame: object) -> None:
        loop.call_soon_threadsafe(stop)

    for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
        number = getattr(signal, name, None)
        if number is None:
            continue
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # loops of Windows
            signal.signal(number, stop_soon)
