"""Linear layers with adapters, see :mod:`inl.ops.lora`: composites of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops.linear import Linear, QkvLinear, product_flops
from inl.ops.lora import SIZES, GatedLora, Lora, QkvLora, arguments
from inl.ops.mlp import ACTIVATIONS, activation_flops
from inl.spec.op import Case, Sizes, Spec, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


def _bases(rng: np.random.Generator, ys: Any, x: Any) -> list[Any]:
    return [rng.standard_normal((y.shape[1], x.shape[1])) for y in ys]


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for name, (*ys, x, selected), pairs, rank in arguments(rng, 1, sizes):
        (weight,) = _bases(rng, ys, x)
        args = (x, Linear(weight), Lora(*pairs), selected)
        yield Case(name, args, {"rank": rank})


def _qkv_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for name, (*ys, x, selected), pairs, rank in arguments(rng, 3, sizes):
        args = (x, QkvLinear(*_bases(rng, ys, x)), QkvLora(*pairs), selected)
        yield Case(name, args, {"rank": rank})


def _gated_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for activation in ACTIVATIONS:
        for name, (*ys, x, selected), pairs, rank in arguments(rng, 2, sizes):
            scale = x.shape[1] ** -0.5
            bases = [Linear(scale * weight) for weight in _bases(rng, ys, x)]
            attrs = {"rank": rank, "activation": activation}
            yield Case(
                f"{name}/{activation}", (x, *bases, GatedLora(*pairs), selected), attrs
            )


def _flops(x: Any, w: Any, loras: Any, selected: Any, **_: Any) -> int:  # noqa: ARG001 - as the op
    return product_flops(x, w) + product_flops(x, loras)


def _gated_flops(
    x: Any, gate: Any, up: Any, w: Any, selected: Any, *, activation: str, **_: Any  # noqa: ARG001 - as the op
) -> int:  # fmt: skip
    inner = Spec((x.shape[0], w.gate_b.shape[0]), x.dtype)
    products = sum(product_flops(x, each) for each in (gate, up, w))
    return products + activation_flops(inner, activation=activation)


@op(cases=_cases, weights=Linear, flops=_flops, layout_opaque=True, since=(1, 2))
def adapted_linear(
    ops: Ops, x: Array, w: Linear, loras: Lora, selected: Array, *, rank: int
) -> Array:
    """Linear layer with adapters: ``w(x) + B(selected * A(x))``.

    x: [T, K]. selected: [T, C], see :data:`~inl.ops.lora.lora`. Returns [T, N].
    """
    return ops.lora(ops.linear(x, w), x, loras, selected, rank=rank)


@op(cases=_qkv_cases, weights=QkvLinear, flops=_flops, layout_opaque=True, since=(1, 2))
def adapted_qkv_linear(
    ops: Ops, x: Array, w: QkvLinear, loras: QkvLora, selected: Array, *, rank: int
) -> tuple[Array, Array, Array]:
    """Project ``x`` [T, K] with adapters to queries, keys and values: three of [T, N].

    selected: [T, C], see :data:`~inl.ops.lora.lora`.
    """
    results = ops.qkv_linear(x, w)
    return ops.qkv_lora(*results, x, loras, selected, rank=rank)


@op(cases=_gated_cases, weights=GatedLora, flops=_gated_flops, since=(1, 2))
def adapted_gate_up(
    ops: Ops,
    x: Array,
    gate: Linear,
    up: Linear,
    w: GatedLora,
    selected: Array,
    *,
    rank: int,
    activation: str,
) -> Array:
    """Gate and up projections of ``x`` [T, K] with adapters, and their activation.

    gate, up: in any layout of :data:`~inl.ops.linear.linear`. selected: [T, C], see
    :data:`~inl.ops.lora.lora`. Returns ``activation(gate(x)) * up(x)``, [T, N].
    """
    gated, raised = ops.linear(x, gate), ops.linear(x, up)
    return ops.gated_lora(
        gated, raised, x, w, selected, rank=rank, activation=activation
    )
