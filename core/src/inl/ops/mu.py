"""Mu guidance: an equilibrium passed from layer to layer, without dynamics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inl.ops.linear import Linear, product_flops
from inl.spec.op import Case, Spec, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

MAX_MU, LIMIT = 2.0, 2.0
"""Upper bound of the learned mu (the lower one is 0), and bound on the result."""


class MuGuidance(NamedTuple):
    """Parameters of :data:`mu_guidance`."""

    mu: Array
    """[H]."""
    context: Array
    """[H, H]."""


class MuStart(NamedTuple):
    """Parameters of :data:`mu_start`."""

    mu: Array
    """[1, 1, H]."""


def _clip_cases(rng: np.random.Generator) -> Iterable[Case]:
    attrs = {"low": -0.5, "high": 2.0}
    yield Case("3x33", (2 * rng.standard_normal((3, 33)),), attrs)


@op(
    shapes=lambda x, *, low, high: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=_clip_cases,
    flops=lambda x, **_: 2 * elements(x),
)
def clip(x: Array, *, low: float, high: float) -> Array:
    """Clamp ``x`` to ``low`` .. ``high``, elementwise."""
    return np.clip(x, low, high)


def _start_cases(rng: np.random.Generator) -> Iterable[Case]:
    x = rng.standard_normal((3, 8))
    yield Case("3x8", (x, MuStart(rng.standard_normal((1, 1, 8)))))


@op(cases=_start_cases, weights=MuStart)
def mu_start(ops: Ops, x: Array, w: MuStart) -> Array:
    """Initial mu for the first layer, broadcast to the shape of ``x`` [T, H]."""
    return ops.zeros_like(x) + w.mu.reshape(1, w.mu.shape[-1])


def _guidance_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, hidden in ((1, 8), (5, 48)):
        h = rng.standard_normal((tokens, hidden))
        context = 2 * rng.standard_normal((hidden, hidden)) / hidden**0.5
        w = MuGuidance(2 * rng.standard_normal(hidden), context)
        yield Case(f"{tokens}x{hidden}", (h, w))


@op(cases=_guidance_cases, weights=MuGuidance, flops=product_flops)
def mu_guidance(ops: Ops, h: Array, w: MuGuidance) -> Array:
    """Mu for the next layer: ``clip(clip(mu, 0, 2) + h @ context.T, -2, 2)``.

    h: residual [T, H]. Returns [T, H].
    """
    mu = ops.clip(w.mu, low=0.0, high=MAX_MU)
    moved = ops.linear(h, Linear(w.context)) + mu
    return ops.clip(moved, low=-LIMIT, high=LIMIT)
