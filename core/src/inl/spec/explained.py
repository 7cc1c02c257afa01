"""Records of the kernels that functions on arrays select, and why not others.

Code that chooses between kernels reports each choice here while a call is explained;
otherwise a report is not made: ``if RECORDS: report(...)`` costs one look-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class Selection(NamedTuple):
    """A kernel that computed a part of a call."""

    kernel: str
    """Function and technology, such as "gemm/torch"."""
    precision: str
    """Of operands and sums of products, or of the arithmetic."""
    refusals: tuple[tuple[str, str], ...] = ()
    """Kernels that were asked before, each with the reason why it does not compute."""


RECORDS: list[list[Selection]] = []
"""Lists to report to, the innermost last; empty unless a call is explained."""

_pending: list[tuple[str, str]] = []
"""Refusals since the last selection."""


@contextmanager
def recording() -> Iterator[list[Selection]]:
    """List the selections of the calls inside. Calls of other threads are mixed in."""
    selections: list[Selection] = []
    RECORDS.append(selections)
    _pending.clear()
    try:
        yield selections
    finally:
        RECORDS.remove(selections)
        _pending.clear()


def refuse(kernel: str, reason: str) -> None:
    """Report that a kernel does not compute the call; a selection follows."""
    if RECORDS and reason:
        _pending.append((kernel, reason))


def report(
    kernel: str, precision: str, refusals: Mapping[str, str] | None = None
) -> None:
    """Report a selection, with the refusals before it. A repeated one is left out."""
    if not RECORDS:
        return
    refused = (*_pending, *((refusals or {}).items()))
    _pending.clear()
    selection = Selection(kernel, precision, tuple(dict.fromkeys(refused)))
    if selection not in RECORDS[-1]:
        RECORDS[-1].append(selection)
