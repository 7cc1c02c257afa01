"""Result of a replay: counts and differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Difference(NamedTuple):
    """A row of a step whose replayed token differs from the recorded one."""

    step: int
    row: int
    sequence: int
    """Number of its admission in the recording, from 1."""
    slot: int
    position: int
    """Position of the token in its sequence."""
    recorded: int
    replayed: int


@dataclass(slots=True)
class Outcome:
    """Result of a replay."""

    steps: int = 0
    """Recorded steps that have a reply."""
    rows: int = 0
    """Compared rows."""
    skipped: int = 0
    """Rows not compared: started before the recording, or after a difference."""
    sequences: int = 0
    """Admissions of the recording."""
    differences: list[Difference] = field(default_factory=list)
    """The first of each sequence, in the order of steps and rows."""
