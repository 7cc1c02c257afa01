"""Groups the failures of a run by the kernel at fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from inl.testing.check import Result

NAMED = 3
"""Names printed of the checks that are only counted."""


class Finding(NamedTuple):
    """One fault: the first check that found it, and the others."""

    first: Result
    same: tuple[Result, ...] = ()
    """Other failures of the same kernel, of the same kind."""
    callers: tuple[Result, ...] = ()
    """Failures of composites, which call this kernel, and of checks that run it."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: check, message, and the other checks."""
        yield f"failed  {self.first.name}"
        yield from (f"        {line}" for line in self.first.message.splitlines())
        if self.same:
            yield f"        found by {_counted(self.same, 'more check')}"
        if self.callers:
            yield f"        also fails {_counted(self.callers, 'check')} that run it"


def _counted(results: Sequence[Result], noun: str) -> str:
    names = ", ".join(result.name for result in results[:NAMED])
    more = ", ..." if len(results) > NAMED else ""
    return f"{len(results)} {noun}{'' if len(results) == 1 else 's'} ({names}{more})"


def findings(results: Iterable[Result]) -> list[Finding]:
    """Group the failed checks of a run, which are in order of dependence.

    Failures without a known kernel, of the runner and the engine, are one finding if a
    kernel is at fault, because they run all kernels.
    """
    failed = [result for result in results if result.status == "failed"]
    groups: dict[object, list[Result]] = {}
    callers: dict[object, list[Result]] = {}
    keys: dict[str, object] = {}
    """Kernel -> key of its first group."""
    for result in failed:
        fault = result.fault
        if fault is None:
            indirect = keys and result.section in ("runner", "engine")
            key: object = "indirect" if indirect else result.name
        else:
            key = fault.cause or fault.kernel, fault.kind
            cause = next((keys[name] for name in keys if name in fault.calls), None)
            if cause is not None and (fault.cause or key not in groups):
                callers.setdefault(cause, []).append(result)
                continue
            keys.setdefault(fault.cause or fault.kernel, key)
        groups.setdefault(key, []).append(result)
    return [
        Finding(first, tuple(same), tuple(callers.get(key, ())))
        for key, (first, *same) in groups.items()
    ]
