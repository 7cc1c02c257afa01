"""Work on threads that has ended when its caller goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(threads: Executor, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, called on a thread.

    A caller that is cancelled waits until the work has ended, unless it has not begun:
    then it never does.
    """
    future = threads.submit(work)
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([waiting])
        raise
    finally:
        del waiting, future  # an error has this frame, and would be kept by it
