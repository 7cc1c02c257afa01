"""A named check and its outcome; the same ones run under pytest and ``inl check``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from inl.errors import RequestError

Status = Literal["passed", "failed", "gap"]


class Measure(NamedTuple):
    """How far a result is from the truth, and how far it may be."""

    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """Share of the allowed error that was used; 0 where nothing may be off."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound else float("inf")


class CheckFailed(AssertionError):
    """A backend does not keep a promise; the message says which, found and expected."""

    def __init__(self, message: str, measure: Measure | None = None) -> None:
        super().__init__(message)
        self.measure = measure


@dataclass(frozen=True, slots=True)
class Check:
    """One promise. ``run`` raises :class:`CheckFailed`, or may tell a measure."""

    section: str
    """One of backend, kernel, runner and engine."""
    name: str
    """Parts between ``/``, such as ``rms_norm/heads/float32``."""
    run: Callable[[], Measure | None]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check."""

    section: str
    name: str
    status: Status
    message: str = ""
    """Why it failed, or the reason of its gap."""
    measure: Measure | None = None
    seconds: float = 0.0


def gap_of(name: str, gaps: Mapping[str, str]) -> str | None:
    """Find the gap that covers a check: its whole name, or its first parts."""
    covers = [gap for gap in gaps if name == gap or name.startswith(f"{gap}/")]
    return max(covers, key=len, default=None)


def check_gaps(gaps: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise :class:`RequestError` for a gap that covers no check or has no reason."""
    known = list(names)
    for gap, reason in gaps.items():
        if not isinstance(reason, str) or not reason.strip():
            raise RequestError(f"gap {gap!r}: found no reason; say why, in a sentence")
        if not any(gap_of(name, {gap: reason}) for name in known):
            firsts = sorted({name.partition("/")[0] for name in known})
            raise RequestError(
                f"gap {gap!r}: covers no check; accepted: a check's name or its first "
                f"parts, such as {known[0] if known else 'rms_norm/heads'}; they begin "
                f"with {', '.join(firsts)}"
            )


def perform(check: Check, gaps: Mapping[str, str]) -> Result:
    """Run one check. A gap that passes has expired, and fails."""
    began = time.perf_counter()
    measure, message = None, ""
    try:
        measure = check.run()
    # A backend is anyone's code: whatever it raises is a failure of this check.
    except Exception as error:
        message = explain(error)
        measure = error.measure if isinstance(error, CheckFailed) else None
    gap = gap_of(check.name, gaps)
    status: Status = "failed" if message else "passed"
    if gap is not None:
        status = "gap" if message else "failed"
        message = gaps[gap] if message else expired(check.name, gap)
    seconds = time.perf_counter() - began
    return Result(check.section, check.name, status, message, measure, seconds)


def explain(error: Exception) -> str:
    """Say what went wrong, in the words of the check where it has some."""
    if isinstance(error, CheckFailed):
        return str(error)
    return f"raised {type(error).__name__}: {error}"


def expired(name: str, gap: str) -> str:
    """Complain about a gap that is none any more."""
    return f"{name} passes: the gap {gap!r} has expired; remove or narrow it"


def require(holds: bool, message: str, measure: Measure | None = None) -> None:
    """Raise :class:`CheckFailed` unless ``holds``."""
    if not holds:
        raise CheckFailed(message, measure)


def equal(what: str, found: object, expected: object) -> None:
    """Raise :class:`CheckFailed` unless both are equal."""
    require(found == expected, f"{what}: found {found!r}, expected {expected!r}")


def worst(measures: Sequence[Measure]) -> Measure:
    """The one nearest to its bound, or furthest beyond it."""
    return max(measures, key=lambda measure: measure.ratio)
