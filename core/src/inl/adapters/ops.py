"""Ops that add the terms of adapters to the linear layers of a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from inl.adapters.weights import (
    AdaptedLinear,
    AdaptedMlp,
    AdaptedQkv,
    AdaptedWeights,
)
from inl.ops.lora import GatedLora, Lora, QkvLora
from inl.spec.op import CATALOG, OpSpec
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

ADAPTED = (AdaptedLinear, AdaptedQkv, AdaptedMlp)


def adapter_ops(
    ops: Ops, weights: AdaptedWeights, step: Step, sampled_step: Step | None
) -> Ops:
    """Return ``ops`` for the adapters that the tokens of a step select.

    sampled_step: the last layer's step, if it computes the sampled tokens only.
    """
    rows, columns = weights.selection.shape
    by_row = ops.take_rows(weights.selection, step.adapters)
    selected = ops.take_rows(by_row, step.rows)
    by_tokens = {selected.shape[0]: selected}
    if sampled_step is not None:
        sampled = ops.take_rows(selected, step.samples)
        by_tokens[sampled.shape[0]] = sampled
    return cast("Ops", AdapterOps(ops, by_tokens, columns // (rows - 1)))


class AdapterOps:
    """Computes ops whose weights have adapters; passes all others on.

    A composite is computed by its body, down to the linear layers.
    """

    def __init__(self, ops: Ops, selected: dict[int, Array], rank: int) -> None:
        self._ops, self._selected, self._rank = ops, selected, rank

    def __getattr__(self, name: str) -> Any:
        spec = CATALOG.get(name)
        if spec is None or spec.weights is None or not spec.composite:
            return getattr(self._ops, name)
        return partial(self._composite, spec)

    def _composite(self, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
        if any(isinstance(each, ADAPTED) for each in args):
            return spec.body(self, *args, **attrs)
        # Looked up now: only ops that were traced can be.
        return getattr(self._ops, spec.name)(*args, **attrs)

    def linear(self, x: Array, w: Any) -> Array:
        """Compute :data:`inl.ops.linear.linear`."""
        if not isinstance(w, AdaptedLinear):
            return self._ops.linear(x, w)
        selected = self._of(x)
        return self._ops.adapted_linear(x, w.base, _lora(w), selected, rank=self._rank)

    def qkv_linear(self, x: Array, w: Any) -> tuple[Array, ...]:
        """Compute :data:`inl.ops.linear.qkv_linear`."""
        if not isinstance(w, AdaptedQkv):
            return self._ops.qkv_linear(x, w)
        assert w.loras is not None, "attached when the weights are loaded"
        matrices = QkvLora(*(matrix for lora in w.loras for matrix in lora))
        return self._ops.adapted_qkv_linear(
            x, w.base, matrices, self._of(x), rank=self._rank
        )

    def gated_mlp(self, x: Array, w: Any, *, activation: str) -> Array:
        """Compute :data:`inl.ops.mlp.gated_mlp`."""
        if not isinstance(w, AdaptedMlp):
            return self._ops.gated_mlp(x, w, activation=activation)
        matrices = GatedLora(*_lora(w.gate), *_lora(w.up))
        inner = self._ops.adapted_gate_up(
            x, w.gate.base, w.up.base, matrices, self._of(x), rank=self._rank,
            activation=activation,
        )  # fmt: skip
        return self.linear(inner, w.down)

    def _of(self, x: Array) -> Array:
        """Return the selected columns [T, C] of the tokens of ``x``."""
        return self._selected[x.shape[0]]


def _lora(w: AdaptedLinear) -> Lora:
    assert w.lora is not None, "attached when the weights are loaded"
    return w.lora
