"""How many tokens to draft: expected tokens per second from measured step times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PRIOR = 0.7
"""Assumed acceptance of a request's first drafts where the drafter has no estimate."""

PRIOR_TRIALS = 2.0
"""Drafts that the assumed acceptance counts for."""

MEMORY = 0.85
"""Weight of a request's earlier drafts after each step that verifies some."""

FORGETTING = 0.97
"""Weight of a request's earlier drafts after each opportunity without drafts, so that
drafting is tried again later."""

GAIN = 1.05
"""Least expected speedup of a step that verifies drafts."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of steps by their number of tokens."""

    seconds: Mapping[int, float]
    """Of steps that verify drafts, at least one entry."""
    plain: Mapping[int, float] = field(default_factory=dict)
    """Of steps of one token per row, whose programs may be faster; without entries the
    same as above."""

    def at(self, tokens: int) -> float:
        """Return the seconds of a step that verifies drafts."""
        return _at(self.seconds, tokens)

    def without_drafts(self, rows: int) -> float:
        """Return the seconds of a step of one token per row."""
        return _at(self.plain or self.seconds, rows)


def _at(seconds: Mapping[int, float], tokens: int) -> float:
    """Return the seconds of a step, interpolated, or extrapolated in proportion."""
    sizes = sorted(seconds)
    place = bisect_left(sizes, tokens)
    if place == len(sizes):
        return seconds[sizes[-1]] * tokens / sizes[-1]
    above = sizes[place]
    if place == 0 or above == tokens:
        return seconds[above]
    below = sizes[place - 1]
    share = (tokens - below) / (above - below)
    low, high = seconds[below], seconds[above]
    return low + share * (high - low)


def never_falling(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return measured times with none above that of a step of more tokens.

    A step takes no longer than a larger one: if it was measured so, other load
    disturbed it.
    """
    bounded: dict[int, float] = {}
    least = float("inf")
    for tokens in sorted(seconds, reverse=True):
        least = bounded[tokens] = min(least, seconds[tokens])
    return dict(sorted(bounded.items()))


@dataclass(slots=True)
class Acceptance:
    """Share of a request's recent drafts that were accepted."""

    prior: float = PRIOR
    """Assumed share before any was observed."""
    memory: float = MEMORY
    """Weight of earlier drafts after each step that verifies some."""
    accepted: float = 0.0
    trials: float = 0.0

    def observe(self, accepted: int, drafted: int) -> None:
        """Count the drafts of a step, up to the first rejected one."""
        self.accepted = self.memory * self.accepted + accepted
        self.trials = self.memory * self.trials + min(accepted + 1, drafted)

    def pass_by(self) -> None:
        """Count an opportunity that was not used."""
        self.accepted *= FORGETTING
        self.trials *= FORGETTING

    @property
    def rate(self) -> float:
        """Estimated probability that the next draft is accepted."""
        trials = self.trials + PRIOR_TRIALS
        return (self.accepted + self.prior * PRIOR_TRIALS) / trials


class DraftCounts(NamedTuple):
    """How many drafts each row verifies."""

    counts: list[int]
    tokens: int
    """Tokens of the step, with padding."""
    saved: float = 0.0
    """Seconds that the step is expected to save for each row, per token of the row."""


def choose_counts(
    lengths: Sequence[int],
    rates: Sequence[float],
    sizes: Sequence[int],
    times: StepTimes | None,
    drafting: Callable[[int], float] = lambda _: 0.0,
) -> DraftCounts:
    """Return the counts that generate most tokens per second.

    lengths: drafts available per row. rates: acceptance of each row. sizes: tokens that
    a verifying step may have, ascending, the last at least the sum of rows and drafts.
    times: without them, every draft is verified. drafting: seconds that it adds to a
    step to draft so many tokens for each row. All counts are 0 if no step with drafts
    is expected to be faster than one without.
    """
    rows = len(lengths)
    total = rows + sum(lengths)
    if times is None:
        size = next(size for size in sizes if size >= total)
        return DraftCounts(list(lengths), size)
    gains = sorted(
        (
            (rate**place, row, place)
            for row, (length, rate) in enumerate(zip(lengths, rates, strict=True))
            for place in range(1, length + 1)
        ),
        reverse=True,
    )
    plain = times.without_drafts(rows)
    best, most, found = GAIN * rows / plain, 0, rows
    for size in sizes:
        count = min(size - rows, len(gains))
        if count < 1:
            continue
        gained = sum(gain for gain, _, _ in gains[:count])
        longest = max(place for _, _, place in gains[:count])
        expected = (rows + gained) / (times.at(size) + drafting(longest))
        if expected > best:
            best, most, found = expected, count, size
        if count == len(gains):
            break
    counts = [0] * rows
    for _, row, _ in gains[:most]:
        counts[row] += 1
    return DraftCounts(counts, found, plain / rows - 1 / best if most else 0.0)
