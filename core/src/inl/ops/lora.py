"""Low-rank adapters (Hu et al., 2021) of linear layers, several in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.ops.linear import Linear, product_flops
from inl.ops.mlp import ACTIVATIONS, activation_flops
from inl.spec.op import Case, Sizes, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES = ((1, 8, 16, 1, 2), (2, 5, 3, 2, 1), (13, 64, 48, 3, 4), (33, 96, 160, 2, 8))
"""(tokens, outputs, inputs, adapters, rank) of the cases."""


class Lora(NamedTuple):
    """Parameters of :data:`lora`: the matrices of all adapters of a layer, stacked.

    ``C`` is the number of adapters times their maximum rank. An adapter of a lower rank
    has zeros in its remaining rows and columns, and one without this layer has only
    zeros.
    """

    a: Array
    """[C, K]: row ``i * rank + j`` is row j of matrix A of adapter i."""
    b: Array
    """[N, C]: columns in the same order, of matrices B times their scale."""


class QkvLora(NamedTuple):
    """Parameters of :data:`qkv_lora`: those of three layers of one input, as ``Lora``.

    All have the same ``C`` and ``K``.
    """

    q_a: Array
    q_b: Array
    k_a: Array
    k_b: Array
    v_a: Array
    v_b: Array


class GatedLora(NamedTuple):
    """Parameters of :data:`gated_lora`: those of two layers of one input, as ``Lora``.

    Both have the same shapes.
    """

    gate_a: Array
    gate_b: Array
    up_a: Array
    up_b: Array


def arguments(
    rng: np.random.Generator, widths: int, sizes: Sizes = SIZES
) -> Iterable[tuple[str, tuple[Any, ...], list[Any], int]]:
    """Yield name, outputs and input, matrices A and B of each layer, and the rank."""
    for tokens, n, k, adapters, rank in sizes:
        x, columns = rng.standard_normal((tokens, k)), adapters * rank
        outputs = [n] * widths if widths < 3 else [3 * n, n, n]
        ys = [rng.standard_normal((tokens, size)) for size in outputs]
        scale = (rank * k) ** -0.5 if widths == 2 else 1.0
        pairs = [
            matrix
            for size in outputs
            for matrix in (
                rng.standard_normal((columns, k)),
                scale * rng.standard_normal((size, columns)),
            )
        ]
        chosen = rng.integers(-1, adapters, tokens)  # -1 is none
        chosen[-1] = adapters - 1
        selected = chosen[:, None] == np.arange(columns) // rank
        tensors = (*ys, x, selected.astype(np.float64))
        yield f"{tokens}x{n}x{k}/{adapters}x{rank}", tensors, pairs, rank


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for name, (*ys, x, selected), pairs, rank in arguments(rng, 1, sizes):
        yield Case(name, (*ys, x, Lora(*pairs), selected), {"rank": rank})


def _qkv_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for name, (*ys, x, selected), pairs, rank in arguments(rng, 3, sizes):
        yield Case(name, (*ys, x, QkvLora(*pairs), selected), {"rank": rank})


def _gated_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for activation in ACTIVATIONS:
        for name, (*ys, x, selected), pairs, rank in arguments(rng, 2, sizes):
            attrs = {"rank": rank, "activation": activation}
            args = (*ys, x, GatedLora(*pairs), selected)
            yield Case(f"{name}/{activation}", args, attrs)


def _flops(y: Any, x: Any, w: Any, selected: Any, **_: Any) -> int:
    return product_flops(x, w) + elements(selected) + elements(y)


def _qkv_flops(q: Any, k: Any, v: Any, x: Any, w: Any, selected: Any, **_: Any) -> int:
    added = elements(q) + elements(k) + elements(v)
    return product_flops(x, w) + 3 * elements(selected) + added


def _gated_flops(
    gate: Any, up: Any, x: Any, w: Any, selected: Any, *, activation: str, **_: Any
) -> int:
    added = 2 * (elements(selected) + elements(up))
    return product_flops(x, w) + added + activation_flops(gate, activation=activation)


@op(cases=_cases, weights=Lora, flops=_flops, overwrites=("y",), since=(1, 2))
def lora(ops: Ops, y: Array, x: Array, w: Lora, selected: Array, *, rank: int) -> Array:
    """Add the adapters' terms to a linear layer: ``y + B(selected * A(x))``.

    y: [T, N], the layer's result. x: [T, K], its input. selected: [T, C] in the compute
    dtype, 1 in the ``rank`` columns of the token's adapter and 0 in all others; all 0
    for a token without one. Returns [T, N]; on several ranks a partial sum where ``y``
    is one.

    The body multiplies with the matrices of all adapters. A grouped kernel may read
    only those that tokens select, and may write its result to the memory of ``y``.
    """
    assert selected.shape[-1] % rank == 0, "whole adapters"
    inner = ops.linear(x, Linear(w.a)) * selected
    return y + ops.linear(inner, Linear(w.b))


@op(
    cases=_qkv_cases,
    weights=QkvLora,
    flops=_qkv_flops,
    overwrites=("q", "k", "v"),
    since=(1, 2),
)
def qkv_lora(
    ops: Ops,
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    w: QkvLora,
    selected: Array,
    *,
    rank: int,
) -> tuple[Array, Array, Array]:
    """Add the adapters' terms to queries, keys and values, see :data:`lora`.

    q, k, v: [T, N], each of its own N. x: [T, K]. selected: [T, C]. Returns three of
    [T, N].
    """
    return (
        ops.lora(q, x, Lora(w.q_a, w.q_b), selected, rank=rank),
        ops.lora(k, x, Lora(w.k_a, w.k_b), selected, rank=rank),
        ops.lora(v, x, Lora(w.v_a, w.v_b), selected, rank=rank),
    )


@op(
    cases=_gated_cases, weights=GatedLora, flops=_gated_flops,
    overwrites=("gate", "up"),
    since=(1, 2),
)  # fmt: skip
def gated_lora(
    ops: Ops,
    gate: Array,
    up: Array,
    x: Array,
    w: GatedLora,
    selected: Array,
    *,
    rank: int,
    activation: str,
) -> Array:
    """Add the adapters' terms to a gated layer and compute its activation.

    ``activation(gate + ...) * (up + ...)``, see :data:`lora` and
    :data:`~inl.ops.mlp.gated_activation`. gate, up: [T, N]. x: [T, K]. selected:
    [T, C]. Returns [T, N].
    """
    return ops.gated_activation(
        ops.lora(gate, x, Lora(w.gate_a, w.gate_b), selected, rank=rank),
        ops.lora(up, x, Lora(w.up_a, w.up_b), selected, rank=rank),
        activation=activation,
    )
