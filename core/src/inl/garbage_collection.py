"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NEVER: Final = 2**31 - 1
"""Threshold of the oldest generation that is not reached."""

_lock = threading.Lock()
_holders: list[int] = []
"""What the threshold was before, once for each block that keeps it away."""


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection while many objects are made but no garbage is.

    They are in the oldest generation then, so that the next collection of young
    objects, which is soon, does not visit them all.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def only_young_collections() -> Iterator[None]:
    """Keep the collector from visiting all objects, which pauses all threads.

    Objects without references are freed as ever, and young garbage is collected. The
    caller collects the rest where a pause harms nobody. Blocks of several threads may
    overlap; afterwards the threshold is what it was before the first one.
    """
    with _lock:
        first, second, third = gc.get_threshold()
        _holders.append(_holders[0] if _holders else third)
        gc.set_threshold(first, second, NEVER)
    try:
        yield
    finally:
        with _lock:
            third = _holders.pop()
            if not _holders:
                gc.set_threshold(*gc.get_threshold()[:2], third)
