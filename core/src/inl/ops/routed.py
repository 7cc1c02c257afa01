"""Token-routed feed-forward layer: each token uses one expert, chosen by its id.

A learned router over mu may override the choice. Expert outputs are not weighted, and
no token is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from inl.ops.inl import sigmoid
from inl.spec.op import Case, Spec, elements, nbytes, op, stored_nbytes
from inl.spec.step import Array

VOTE = 10.0
"""Added to the score of the expert that belongs to the token's id."""


class TokenRoutedMlp(NamedTuple):
    """Parameters of :data:`token_routed_mlp`."""

    gate_up: Array
    """[E, H, 2 * I]: gate, then up projection."""
    down: Array
    """[E, I, H]."""
    router: Array | None = None
    """[E, H], applied to mu; ``None`` routes by id only."""
    experts: Array | None = None
    """[V] int32: expert of each token id; ``None`` is the id modulo E."""


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, experts, hidden, inner in ((1, 3, 40, 24), (19, 4, 32, 24)):
        x, mu = rng.standard_normal((2, tokens, hidden))
        ids = rng.integers(0, 50, tokens).astype(np.int32)
        gate_up = rng.standard_normal((experts, hidden, 2 * inner)) / hidden**0.5
        down = rng.standard_normal((experts, inner, hidden)) / inner**0.5
        # Scores differ by at least 1/8, so that rounding in no dtype changes an expert.
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
    rows = int(math.prod(x.shape[:-1]))
    router = 0 if w.router is None else elements(w.router)
    expert = int(math.prod(w.gate_up.shape[1:])) + int(math.prod(w.down.shape[1:]))
    return 2 * rows * (expert + router)


def _traffic(out: Any, x: Any, tokens: Any, mu: Any, w: Any) -> int:
    """As many experts as there are tokens, at most all; a table entry per token."""
    used = min(w.gate_up.shape[0], elements(tokens))
    experts = stored_nbytes((w.gate_up, w.down)) * used // int(w.gate_up.shape[0])
    routing = stored_nbytes((mu, w.router)) if w.router is not None else 0
    table = nbytes(tokens) if w.experts is not None else 0
    return int(nbytes((x, tokens, out)) + experts + routing + table)


@op(
    shapes=lambda x, tokens, mu, w: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=_cases,
    weights=TokenRoutedMlp,
    flops=_flops,
    traffic=_traffic,
    used_by="INL models",
)
def token_routed_mlp(x: Array, tokens: Array, mu: Array, w: TokenRoutedMlp) -> Array:
    """One gated feed-forward expert per token: ``down(silu(gate(x)) * up(x))``.

    x: [T, H]. tokens: int32 [T] ids. mu: [T, H], input of the router. The expert has
    the highest score of ``10 * onehot(expert of the id) + mu @ router.T``, computed in
    float32; ties go to the lowest index. Returns [T, H].
    """
    chosen = chosen_experts(tokens, mu, w)
    out = np.zeros_like(x)
    for expert in np.unique(chosen):
        rows = chosen == expert
        gate, up = np.split(x[rows] @ w.gate_up[expert], 2, axis=-1)
        out[rows] = (gate * sigmoid(gate) * up) @ w.down[expert]
    return out


def chosen_experts(tokens: Any, mu: Any, w: TokenRoutedMlp) -> Any:
    """Return the expert of each token: [T]."""
    count = w.gate_up.shape[0]
    base = tokens % count if w.experts is None else w.experts[tokens]
    if w.router is None:
        return base
    votes = VOTE * (base[:, None] == np.arange(count))
    return np.argmax(votes + mu @ w.router.T, axis=-1)
