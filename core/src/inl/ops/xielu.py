"""The activation of Apertus: quadratic above zero, exponential below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inl.spec.op import Case, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

FACTORS: Final = 6
"""Factors of the reciprocal: the next one differs from 1 by less than 2^-64."""


class Xielu(NamedTuple):
    """Parameters of :data:`xielu`, each of one element."""

    positive: Array
    """[1]: factor on squares."""
    negative: Array
    """[1]: factor on what exponentials exceed their argument by."""
    slope: Array
    """[1]: factor on all."""


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    x = np.concatenate([3 * rng.standard_normal((4, 40)), np.zeros((1, 40))])
    edges = np.array([[-100.0, -20.0, -0.01, 0.0, 0.01, 20.0, 100.0]])
    for positive, negative, slope in ((0.8, 0.8, 0.5), (0.3, 2.0, 0.75)):
        w = Xielu(*(np.array([each]) for each in (positive, negative, slope)))
        yield Case(f"{positive}", (x, w))
        yield Case(f"{positive}/edges", (edges, w))


@op(
    cases=_cases,
    weights=Xielu,
    flops=lambda x, _w: 20 * elements(x),
    since=(2, 1),
)
def xielu(ops: Ops, x: Array, w: Xielu) -> Array:
    """Activation xIELU of each element (Huang and Schlag, 2024), in float32.

    x: [T, I]. Returns ``slope * x + positive * x^2`` above zero, and ``slope * x +
    negative * (expm1(x) - x)`` below.

    The body has no exponential: ``expm1(y) = tanh(y / 2) / (1 - s)`` with ``s =
    sigmoid(y)``, which is at most a half for ``y <= 0``, and ``1 / (1 - s)`` is the
    product of ``1 + s``, ``1 + s^2``, ``1 + s^4`` and so on.
    """
    above = ops.activate(x, kind="relu")
    below = x - above
    power = ops.activate(below, kind="sigmoid")
    grown = ops.activate(below * 0.5, kind="tanh") * (power + 1.0)
    for _ in range(FACTORS - 1):
        power = power * power
        grown = grown * (power + 1.0)
    bent = (grown - below) * w.negative
    return x * w.slope + above * above * w.positive + bent
