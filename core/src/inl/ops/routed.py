"""A feed-forward layer of which each token uses one part, chosen by its id.

Routing is hard: an expert belongs to each id, and a learned router over mu may outvote
it. There is no gate weight, and no token is ever dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from inl.ops.inl import sigmoid
from inl.spec.kernel import PLAIN
from inl.spec.op import Case, Spec, op
from inl.spec.step import Array

VOTE = 10.0
"""What the expert of a token's id is ahead by, before the router has its say."""


class TokenRoutedMlp(NamedTuple):
    """Parameters of :data:`token_routed_mlp`."""

    gate_up: Array
    """[E, H, 2 * I], gates first."""
    down: Array
    """[E, I, H]."""
    router: Array | None = None
    """[E, H], over mu; without it the id alone decides."""
    experts: Array | None = None
    """[V] int32: the expert of each id; without it, the id modulo E."""

    @property
    def layout(self) -> str:
        """Unpacked."""
        return PLAIN


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, experts, hidden, inner in ((1, 3, 40, 24), (19, 4, 32, 24)):
        x, mu = rng.standard_normal((2, tokens, hidden))
        ids = rng.integers(0, 50, tokens).astype(np.int32)
        gate_up = rng.standard_normal((experts, hidden, 2 * inner)) / hidden**0.5
        down = rng.standard_normal((experts, inner, hidden)) / inner**0.5
        # Scores are whole numbers apart, so that no dtype's rounding moves a token.
        mu = np.where(mu > 0, 1.0, -1.0)
        router = rng.integers(-4, 5, (experts, hidden)) + 0.125 * np.arange(
            experts
        ).reshape(-1, 1) * (np.arange(hidden) == 0)
        table = rng.integers(0, experts, 50).astype(np.int32)
        name = f"{tokens}x{experts}x{hidden}x{inner}"
        plain = TokenRoutedMlp(gate_up, down)
        yield Case(name, (x, ids, mu, plain))
        routed = plain._replace(router=router, experts=table)
        yield Case(f"{name}/router", (x, ids, mu, routed))


def _flops(x: Any, _tokens: Any, _mu: Any, w: Any, **_: Any) -> int:
    rows = int(np.prod(x.shape[:-1]))
    router = 0 if w.router is None else int(np.prod(w.router.shape))
    expert = int(np.prod(w.gate_up.shape[1:])) + int(np.prod(w.down.shape[1:]))
    return 2 * rows * (expert + router)


@op(
    shapes=lambda x, tokens, mu, w: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=_cases,
    weights=TokenRoutedMlp,
    flops=_flops,
)
def token_routed_mlp(x: Array, tokens: Array, mu: Array, w: TokenRoutedMlp) -> Array:
    """``down(silu(gate(x)) * up(x))`` of one expert for each row of ``x`` [T, H].

    tokens: [T] ids. mu: [T, H], which the router reads. The expert is the likeliest of
    ``10 * onehot(expert of the id) + mu @ router.T``, ties to the lowest, in float32.
    """
    chosen = chosen_experts(tokens, mu, w)
    out = np.zeros_like(x)
    for expert in np.unique(chosen):
        rows = chosen == expert
        gate, up = np.split(x[rows] @ w.gate_up[expert], 2, axis=-1)
        out[rows] = (gate * sigmoid(gate) * up) @ w.down[expert]
    return out


def chosen_experts(tokens: Any, mu: Any, w: TokenRoutedMlp) -> Any:
    """The expert of each token: [T]."""
    count = w.gate_up.shape[0]
    base = tokens % count if w.experts is None else w.experts[tokens]
    if w.router is None:
        return base
    votes = VOTE * (base[:, None] == np.arange(count))
    return np.argmax(votes + mu @ w.router.T, axis=-1)
