"""Gated feed-forward layers (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.ops.linear import Linear, product_flops
from inl.spec.op import Case, Sizes, Spec, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

ACTIVATIONS = ("silu", "gelu_tanh")
"""Accepted values of the ``activation`` attribute."""

MLP_SIZES = ((1, 8, 16), (5, 48, 96))
"""(tokens, hidden, inner) of the cases of :data:`gated_mlp`."""


class GatedMlp(NamedTuple):
    """Parameters of :data:`gated_mlp`."""

    gate: Array
    """[I, H]."""
    up: Array
    """[I, H]."""
    down: Array
    """[H, I]."""


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for rows, width in ((1, 3), (5, 96)):
        gate, up = 4 * rng.standard_normal((2, rows, width))
        for activation in ACTIVATIONS:
            name = f"{rows}x{width}/{activation}"
            yield Case(name, (gate, up), {"activation": activation})
    edge = np.array([[-100.0, -20.0, 0.0, 20.0, 100.0]])
    yield Case("edges", (edge, np.ones_like(edge)), {"activation": "silu"})


def activation_flops(gate: Any, *_: Any, activation: str) -> int:
    """5 per element for "silu", 10 for "gelu_tanh"; an exponential counts as 1."""
    return (5 if activation == "silu" else 10) * elements(gate)


@op(
    shapes=lambda gate, up, *, activation: Spec(gate.shape, gate.dtype),  # noqa: ARG005
    cases=_cases,
    flops=activation_flops,
)
def gated_activation(gate: Array, up: Array, *, activation: str) -> Array:
    """``activation(gate) * up``, elementwise, in float32.

    "silu" is ``g * sigmoid(g)``; "gelu_tanh" is the tanh approximation of GELU
    (Hendrycks and Gimpel, 2016).
    """
    if activation == "silu":
        return gate * (0.5 + 0.5 * np.tanh(0.5 * gate)) * up
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    # 2 sigmoid(2 z) equals 1 + tanh(z) without cancellation for large negative z.
    return gate / (1 + np.exp(np.minimum(-2 * inner, 80))) * up


def _mlp_cases(rng: np.random.Generator, sizes: Sizes = MLP_SIZES) -> Iterable[Case]:
    for tokens, hidden, inner in sizes:
        x = rng.standard_normal((tokens, hidden))
        gate, up = rng.standard_normal((2, inner, hidden))
        w = GatedMlp(gate, up, rng.standard_normal((hidden, inner)))
        yield Case(f"{tokens}x{hidden}x{inner}", (x, w), {"activation": "silu"})


def mlp_flops(x: Any, w: Any, *, activation: str) -> int:
    """Three products, and the activation of [T, I]."""
    inner = Spec((*x.shape[:-1], w.gate.shape[0]), x.dtype)
    return product_flops(x, w) + activation_flops(inner, activation=activation)


@op(cases=_mlp_cases, weights=GatedMlp, flops=mlp_flops)
def gated_mlp(ops: Ops, x: Array, w: GatedMlp, *, activation: str) -> Array:
    """Gated feed-forward layer: ``down(activation(gate(x)) * up(x))``.

    x: [T, H]. Returns this rank's partial sum, [T, H].
    """
    gate = ops.linear(x, Linear(w.gate))
    up = ops.linear(x, Linear(w.up))
    return ops.linear(
        ops.gated_activation(gate, up, activation=activation), Linear(w.down)
    )
