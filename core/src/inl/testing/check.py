"""Named conformance checks and their results, for pytest and ``inl check``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from inl.errors import NoKernel, RequestError
from inl.errors import message as describe

Status = Literal["passed", "failed", "gap"]


class Measure(NamedTuple):
    """Error of a result and the largest error allowed."""

    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """Error relative to the bound; 0 for an exact result."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound else float("inf")


class Fault(NamedTuple):
    """What a failed check found; failures with the same fault are reported once."""

    kernel: str
    """Display name of the kernel, or of the op that has none."""
    kind: str
    """"value", "NaN", "dtype", "shape", "argument", "raises" or "missing"."""
    calls: frozenset[str] = frozenset()
    """Kernels that ran, or ops that were called, other than this one."""
    cause: str = ""
    """The first of ``calls`` that is wrong on the inputs it got, if it is known."""


class CheckFailed(AssertionError):
    """A check failed; the message states what was found and what was expected."""

    def __init__(
        self, message: str, measure: Measure | None = None, fault: Fault | None = None
    ) -> None:
        super().__init__(message)
        self.measure = measure
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``run`` raises :class:`CheckFailed` or may return a measure."""

    section: str
    """One of backend, kernel, runner, blocks, engine and ranks."""
    name: str
    """Parts separated by ``/``, such as ``rms_norm/heads/float32``."""
    run: Callable[[], Measure | None]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one check."""

    section: str
    name: str
    status: Status
    message: str = ""
    """Reason of the failure or of the gap."""
    measure: Measure | None = None
    seconds: float = 0.0
    fault: Fault | None = None
    """Kernel at fault, if it is known."""


def gap_of(name: str, gaps: Mapping[str, str]) -> str | None:
    """Return the longest gap that covers a check: its name, or its first parts."""
    matches = [gap for gap in gaps if name == gap or name.startswith(f"{gap}/")]
    return max(matches, key=len, default=None)


def check_gaps(gaps: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise :class:`RequestError` for a gap that covers no check or has no reason."""
    known = list(names)
    for gap, reason in gaps.items():
        if not isinstance(reason, str) or not reason.strip():
            raise RequestError(f"gap {gap!r}: the reason is empty; give one sentence")
        if not any(gap_of(name, {gap: reason}) for name in known):
            prefixes = sorted({name.partition("/")[0] for name in known})
            raise RequestError(
                f"gap {gap!r}: covers no check; accepted: a check's name or its first "
                f"parts, such as {known[0] if known else 'rms_norm/heads'}; "
                f"first parts: {', '.join(prefixes)}"
            )


def perform(check: Check, gaps: Mapping[str, str]) -> Result:
    """Run one check. A check that passes despite a gap fails: the gap has expired."""
    began = time.perf_counter()
    measure, message, fault = None, "", None
    try:
        measure = check.run()
    # Any exception of a third-party backend is a failure of this check.
    except Exception as error:
        message, fault = explain(error), fault_of(error)
        measure = error.measure if isinstance(error, CheckFailed) else None
    gap = gap_of(check.name, gaps)
    status: Status = "failed" if message else "passed"
    if gap is not None:
        status = "gap" if message else "failed"
        message = gaps[gap] if message else expired(check.name, gap)
    seconds = time.perf_counter() - began
    return Result(check.section, check.name, status, message, measure, seconds, fault)


def explain(error: Exception) -> str:
    """Return the message of a failure."""
    if isinstance(error, CheckFailed):
        return str(error)
    return f"raised {type(error).__name__}: {describe(error)}"


def fault_of(error: Exception) -> Fault | None:
    """Return the fault that an exception names: a kernel that raised or is missing."""
    if isinstance(error, CheckFailed):
        return error.fault
    if isinstance(error, NoKernel) and error.op:
        return Fault(error.op, "missing")
    return None


def expired(name: str, gap: str) -> str:
    """Return the message for a check that passes despite a gap."""
    return f"{name} passes: the gap {gap!r} has expired; remove or narrow it"


def require(holds: bool, message: str, measure: Measure | None = None) -> None:
    """Raise :class:`CheckFailed` unless ``holds``."""
    if not holds:
        raise CheckFailed(message, measure)


def equal(what: str, found: object, expected: object) -> None:
    """Raise :class:`CheckFailed` unless both are equal."""
    require(found == expected, f"{what}: found {found!r}, expected {expected!r}")


def worst(measures: Sequence[Measure]) -> Measure:
    """Return the measure with the largest ratio of error to bound."""
    return max(measures, key=lambda measure: measure.ratio)
