"""The gap rule: where a greedy answer may leave the oracle's, and where it may not.

Two right computations round differently, so a token may first differ where the
oracle's best two logits lie closer together than the dtype can tell. After such a place
the texts are different texts and nothing more is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BOUNDS = {"float64": 1e-6, "float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Gap of the best two logits below which a dtype may choose the other one."""


class Compared(NamedTuple):
    """How far an answer agrees with the oracle's."""

    agreed: int
    """Tokens that are equal from the start."""
    gap: float | None
    """Oracle's gap where they first differ; ``None`` where they never do."""

    def allowed(self, dtype: str) -> bool:
        """Whether they are equal, or first differ where the dtype cannot tell."""
        return self.gap is None or self.gap < BOUNDS[dtype]


def compare(
    found: Sequence[int], oracle: Sequence[int], margins: Sequence[float]
) -> Compared:
    """Compare greedy answers; ``margins`` are the oracle's gaps, one a token."""
    for place, (got, want) in enumerate(zip(found, oracle, strict=False)):
        if got != want:
            return Compared(place, margins[place])
    if len(found) != len(oracle):
        return Compared(min(len(found), len(oracle)), float("inf"))
    return Compared(len(oracle), None)
