"""Feed-forward layers: gated ones that kernels fuse, and all others.

Biases, activations that no kernel fuses and layers without a gate are computed as
single linear layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.models import groups
from inl.ops.linear import Linear
from inl.ops.mlp import ACTIVATIONS as FUSED
from inl.ops.mlp import GatedMlp
from inl.ops.xielu import Xielu
from inl.spec.step import Array
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
    "relu2": "relu_squared",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""Activations by name; of the tanh approximation of GELU there are several."""


class OpenMlp(NamedTuple):
    """A feed-forward layer as single linear layers."""

    up: Linear | Group
    down: Linear | Group
    gate: Linear | Group | None = None
    """``None`` if the activation applies to the result of ``up`` alone."""
    xielu: Xielu | Group | None = None
    """The activation of a layer without a gate, if it has parameters."""


def weights(c: Any, stem: str) -> Group | OpenMlp:
    """Return the gated layer of a module, fused where kernels can.

    c: a config with ``activation`` and ``mlp_bias``.
    """
    if c.activation in FUSED and not c.mlp_bias:
        return groups.gated(stem, c.hidden_size, c.intermediate_size)
    return OpenMlp(*(open_linear(c, f"{stem}.{name}_proj", c.mlp_bias, name == "down")
                     for name in ("up", "down", "gate")))  # fmt: skip


def open_linear(c: Any, stem: str, bias: bool, down: bool = False) -> Group:
    """Return a linear layer between the hidden and the inner lanes of a block."""
    shape = c.intermediate_size, c.hidden_size
    if down:
        return groups.linear(stem, *reversed(shape), axis=1, bias=bias)
    return groups.linear(stem, *shape, axis=0, bias=bias)


def ungated(c: Any, up: str, down: str) -> OpenMlp:
    """Return the layer without a gate of two modules."""
    return OpenMlp(
        open_linear(c, up, c.mlp_bias), open_linear(c, down, c.mlp_bias, down=True)
    )


def fused_weights(c: Any, stem: str) -> Group | OpenMlp:
    """Return the layer of a module that stores gate and up rows in one tensor."""
    group = groups.fused_gated(stem, c.hidden_size, c.intermediate_size)
    if c.activation in FUSED:
        return group
    names = ("up", "down", "gate")
    return OpenMlp(*(Group("linear", weight=group.params[name]) for name in names))


def feed_forward(
    ops: Ops, x: Array, w: GatedMlp | OpenMlp | Group, activation: str
) -> Array:
    """Return the layer's partial sum on this rank, [T, H]."""
    if not isinstance(w, OpenMlp):
        return ops.gated_mlp(x, w, activation=activation)
    up = ops.linear(x, w.up)
    if w.xielu is not None:
        return ops.linear(ops.xielu(up, w.xielu), w.down)
    gate = up if w.gate is None else ops.linear(x, w.gate)
    other = ops.zeros_like(up) + 1.0 if w.gate is None else up
    if activation in FUSED:
        inner = ops.gated_activation(gate, other, activation=activation)
    else:
        inner = ops.activate(gate, kind=activation) * other
    return ops.linear(inner, w.down)
