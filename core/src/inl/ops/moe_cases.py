"""Test cases of the mixture-of-experts ops; weights come last, as plain tuples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from inl.spec.op import Case, Sizes

SIZES = ((1, 4, 2), (7, 8, 2), (40, 5, 3), (3, 2, 2), (9, 1, 1))
"""(tokens, experts, experts per token) of the cases."""


def route_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, experts, k in sizes:
        logits = 3 * rng.standard_normal((tokens, experts))
        for kind in ("softmax_topk", "topk_softmax", "sigmoid"):
            for renormalize in (False, True):
                attrs = {"k": k, "kind": kind, "renormalize": renormalize}
                name = f"{tokens}x{experts}x{k}/{kind}/{renormalize}"
                yield Case(name, (logits,), attrs)
    tied = np.array([[1.0, 2, 2, 0, 2], [0, 0, 0, 0, 0], [-0.0, 0.0, -1, 0.0, -2]])
    tied = np.vstack([tied, [-200.0, -300, 0, -250, -200]])
    attrs = {"k": 2, "kind": "softmax_topk", "renormalize": True}
    yield Case("ties", (tied,), attrs)
    yield Case("vanishing", (tied - 300,), {**attrs, "kind": "sigmoid"})


def choice(rng: np.random.Generator, tokens: int, experts: int, k: int) -> Any:
    """Return distinct random experts for every token; expert 0 is the most frequent."""
    odds = rng.standard_normal((tokens, experts))
    odds[:, 0] += 1
    return np.argsort(-odds, axis=-1)[:, :k].astype(np.int32)


def shares(rng: np.random.Generator, tokens: int, k: int) -> Any:
    """Return random slot weights, float32 like those of :data:`~inl.ops.moe.route`."""
    weights = rng.random((tokens, k)) + 0.05
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def linear_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, experts, k in sizes:
        ids = choice(rng, tokens, experts, k)
        weight = rng.standard_normal((experts, 6, 16)) / 4
        for slots in {1, k}:
            x = rng.standard_normal((tokens, slots, 16))
            yield Case(f"{tokens}x{experts}x{k}/{slots}", (x, ids, (weight,)))


def combine_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, _, k in SIZES:
        y = rng.standard_normal((tokens, k, 12))
        yield Case(f"{tokens}x{k}", (y, shares(rng, tokens, k)))


def matrices(rng: np.random.Generator, experts: int, inner: int, hidden: int) -> Any:
    """Return gate, up and down matrices of every expert."""
    gate, up = 1.5 * rng.standard_normal((2, experts, inner, hidden)) / hidden**0.5
    down = rng.standard_normal((experts, hidden, inner)) / inner**0.5
    return gate, up, down


def experts_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, experts, k in sizes:
        x = rng.standard_normal((tokens, 16))
        args = x, choice(rng, tokens, experts, k), shares(rng, tokens, k)
        w = matrices(rng, experts, 12, 16)
        activation = "silu" if k < 3 else "gelu_tanh"
        yield Case(f"{tokens}x{experts}x{k}", (*args, w), {"activation": activation})
    x, ids = rng.standard_normal((20, 16)), np.full((20, 1), 2, np.int32)
    w, one = matrices(rng, 4, 12, 16), np.ones((20, 1), np.float32)
    yield Case("all-to-one", (x, ids, one, w), {"activation": "silu"})


def gate_cases(rng: np.random.Generator) -> Iterable[Case]:
    x, gate = rng.standard_normal((5, 24)), 3 * rng.standard_normal((5, 1))
    yield Case("5x24", (x, gate))
    yield Case("edges", (x[:4], np.array([[-100.0], [-8], [8], [100]])))


def slot_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, experts, k in SIZES:
        for capacity in (0, 1, 3, tokens):
            attrs = {"experts": experts, "capacity": capacity}
            args = choice(rng, tokens, experts, k), shares(rng, tokens, k)
            yield Case(f"{tokens}x{experts}x{k}/{capacity}", args, attrs)


def dispatch_cases(rng: np.random.Generator) -> Iterable[Case]:
    for factor in (0.5, 1.0, 4.0):
        x, logits = rng.standard_normal((24, 16)), rng.standard_normal((24, 4))
        attrs: dict[str, Any] = {"k": 2, "capacity_factor": factor}
        attrs |= {"kind": "softmax_topk", "activation": "silu"}
        yield Case(f"{factor:g}", (x, logits, matrices(rng, 4, 12, 16)), attrs)


def loss_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, experts, k in SIZES:
        logits = 2 * rng.standard_normal((tokens, experts))
        yield Case(f"{tokens}x{experts}x{k}", (logits,), {"k": k})
    yield Case("even", (np.zeros((6, 3)),), {"k": 3})


def typed(weights: Any, cases: Iterable[Case]) -> Iterable[Case]:
    """Convert the last argument of each case, a tuple, to its weights type."""
    for case in cases:
        yield Case(case.name, (*case.args[:-1], weights(*case.args[-1])), case.attrs)
