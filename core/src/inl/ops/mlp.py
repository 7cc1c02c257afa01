"""Gated feed-forward layers (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inl.ops.linear import Linear, product_flops
from inl.spec.kernel import PLAIN
from inl.spec.op import Case, Spec, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

ACTIVATIONS = ("silu", "gelu_tanh")


class GatedMlp(NamedTuple):
    """Parameters of :data:`gated_mlp`."""

    gate: Array
    """[I, H]."""
    up: Array
    """[I, H]."""
    down: Array
    """[H, I]."""

    @property
    def layout(self) -> str:
        """Unpacked."""
        return PLAIN


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for rows, width in ((1, 3), (5, 96)):
        gate, up = 4 * rng.standard_normal((2, rows, width))
        for activation in ACTIVATIONS:
            name = f"{rows}x{width}/{activation}"
            yield Case(name, (gate, up), {"activation": activation})
    edge = np.array([[-100.0, -20.0, 0.0, 20.0, 100.0]])
    yield Case("edges", (edge, np.ones_like(edge)), {"activation": "silu"})


@op(
    shapes=lambda gate, up, *, activation: Spec(gate.shape, gate.dtype),  # noqa: ARG005
    cases=_cases,
)
def gated_activation(gate: Array, up: Array, *, activation: str) -> Array:
    """``activation(gate) * up``, elementwise, in float32.

    "silu" is ``g * sigmoid(g)``; "gelu_tanh" is Hendrycks and Gimpel's tanh form.
    """
    if activation == "silu":
        return gate * (0.5 + 0.5 * np.tanh(0.5 * gate)) * up
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    # 1 + tanh(z) as 2 sigmoid(2 z), which keeps its digits far below 0.
    return gate / (1 + np.exp(np.minimum(-2 * inner, 80))) * up


def _mlp_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, hidden, inner in ((1, 8, 16), (5, 48, 96)):
        x = rng.standard_normal((tokens, hidden))
        gate, up = rng.standard_normal((2, inner, hidden))
        w = GatedMlp(gate, up, rng.standard_normal((hidden, inner)))
        yield Case(f"{tokens}x{hidden}x{inner}", (x, w), {"activation": "silu"})


@op(cases=_mlp_cases, weights=GatedMlp, flops=product_flops)
def gated_mlp(ops: Ops, x: Array, w: GatedMlp, *, activation: str) -> Array:
    """``down(activation(gate(x)) * up(x))`` for ``x`` [T, H]: this rank's part."""
    gate = ops.linear(x, Linear(w.gate))
    up = ops.linear(x, Linear(w.up))
    return ops.linear(
        ops.gated_activation(gate, up, activation=activation), Linear(w.down)
    )
