"""Comparison of greedy outputs that allows differences at near-ties.

Two correct computations round differently, so their greedy outputs may first differ
where the two largest logits of the oracle are closer than the dtype can resolve. After
such a token the texts diverge and nothing more is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BOUNDS = {"float64": 1e-6, "float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Gap of the two largest logits below which a dtype may select either token."""


class Comparison(NamedTuple):
    """Agreement of an answer with that of the oracle."""

    agreed: int
    """Length of the common prefix, in tokens."""
    gap: float | None
    """Logit gap of the oracle at the first difference; ``None`` if they are equal."""

    def allowed(self, dtype: str) -> bool:
        """Whether the answers are equal, or first differ at a near-tie."""
        return self.gap is None or self.gap < BOUNDS[dtype]


def compare(
    found: Sequence[int], oracle: Sequence[int], margins: Sequence[float]
) -> Comparison:
    """Compare greedy answers.

    margins: gap of the two largest logits of the oracle at each of its tokens.
    """
    for index, (got, want) in enumerate(zip(found, oracle, strict=False)):
        if got != want:
            return Comparison(index, margins[index])
    if len(found) != len(oracle):
        return Comparison(min(len(found), len(oracle)), float("inf"))
    return Comparison(len(oracle), None)
