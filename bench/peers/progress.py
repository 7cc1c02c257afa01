"""What is done so far, on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def bar(done: int, total: int, text: str) -> None:
    """Draw the progress on a terminal; elsewhere one line each."""
    if not sys.stderr.isatty():
        return say(f"[{done}/{total}] {text}")
    full = 30 * done // total
    line = f"\r{'█' * full}{'░' * (30 - full)} {done}/{total} {text:<44.44}"
    print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)
    return None
