"""Kernels over values of a graph, and those that compute an op's body on the host.

A model's ``embed`` and the sampler run on the host, its layers and head in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from openvino import opset15 as ops

from inl.checkpoints.blocks.codes import SPLIT
from inl.ops.activation import check_kind
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import LayerNorm, Norm
from inl.spec.kernel import Kernel
from inl.spec.op import CATALOG
from inl.spec.tree import leaves, tree_map
from inl.weights.packing import packer, refuse_dtypes
from inl_intel.openvino.attention import attention, take, write_kv
from inl_intel.openvino.graph import Value
from inl_intel.openvino.single import evaluated
from inl_intel.openvino.weights import Codes, codes_of

if TYPE_CHECKING:
    from inl_intel.openvino.runtime import Runtime

TECHNOLOGY: Final = "openvino"
LAYOUT: Final = "openvino"

HOSTED: Final = (
    "admit", "embedding", "expand_rows", "make_step", "mask_logits", "rope_table",
    "prune_last_layer", "sample", "score", "set_token_bias", "verify",
)  # fmt: skip
"""Ops that only the host computes: steps, embeddings, angles and sampling."""

EMBEDDING: Final = ("take_rows", "zeros_like")
"""Ops that a model calls in ``embed``, with arrays, and in its layers."""


def linear(x: Value, w: Linear) -> Value:
    return product(x, w.weight, w.bias)


def product(x: Value, weight: Any, bias: Any = None) -> Value:
    """``x`` [..., K] @ ``weight`` [N, K].T + ``bias`` [N]: [..., N]."""
    packed = isinstance(weight, Codes)
    matrix = weight.node() if packed else x.graph.weight(weight).output
    shape = *x.shape[:-1], weight.shape[0]
    y = x.made(ops.matmul(x.output, matrix, False, True), shape)
    return y if bias is None else y + bias


def qkv_linear(x: Value, w: QkvLinear) -> tuple[Value, Value, Value]:
    return (
        product(x, w.q, w.q_bias),
        product(x, w.k, w.k_bias),
        product(x, w.v, w.v_bias),
    )


def gated_mlp(x: Value, w: GatedMlp, *, activation: str) -> Value:
    gate, up = product(x, w.gate), product(x, w.up)
    return product(gated_activation(gate, up, activation=activation), w.down)


def soft_cap(x: Value, *, cap: float) -> Value:
    scaled = x * (1 / cap)
    return scaled.made(ops.tanh(scaled.output)) * cap


def mean(x: Value) -> Value:
    """Mean over the last axis, which stays with a size of 1."""
    axes = ops.constant(np.array([-1]))
    return x.made(ops.reduce_mean(x.output, axes, True), (*x.shape[:-1], 1))


def rms_norm(x: Value, w: Norm, *, eps: float) -> Value:
    # In this form, which OpenVINO computes as one node.
    two, one = (ops.constant(np.float32(number)) for number in (2, 1))
    root = ops.sqrt((mean(x.made(ops.power(x.output, two))) + eps).output)
    y: Value = x.made(ops.multiply(x.output, ops.divide(one, root))) * w.weight
    return y


def layer_norm(x: Value, w: LayerNorm, *, eps: float) -> Value:
    axes = ops.constant(np.array([-1]))
    y: Value = x.made(ops.mvn(x.output, axes, True, eps, "INSIDE_SQRT")) * w.weight
    return y if w.bias is None else y + w.bias


def rope(q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Value, cos: Value, sin: Value) -> Value:
    """Rotate both halves of the heads of ``x`` [T, heads, dim]."""
    half = x.shape[-1] // 2
    cos, sin = (part.reshape(part.shape[0], 1, -1) for part in (cos, sin))
    a, b = x[..., :half], x[..., half:]
    first, second = a * cos - b * sin, b * cos + a * sin
    return x.made(ops.concat([first.output, second.output], -1))


def activated(x: Value, kind: str) -> Value:
    """Return an activation of the core's names."""
    if kind in ("gelu", "gelu_tanh"):
        return x.made(ops.gelu(x.output, "tanh" if kind == "gelu_tanh" else "erf"))
    if kind == "gelu_sigmoid":
        return x.made(ops.swish(x.output, ops.constant(np.float32(1.702))))
    if kind == "relu_squared":
        y = x.made(ops.relu(x.output))
        return y * y
    nodes = {
        "silu": ops.swish, "sigmoid": ops.sigmoid, "tanh": ops.tanh, "relu": ops.relu,
    }  # fmt: skip
    return x.made(nodes[kind](x.output))


def gated_activation(gate: Value, up: Value, *, activation: str) -> Value:
    return activated(gate, activation) * up


def activate(x: Value, *, kind: str) -> Value:
    check_kind(kind)
    return activated(x, kind)


def silu(x: Value) -> Value:
    return activated(x, "silu")


def sigmoid_gate(x: Value, gate: Value) -> Value:
    return x * activated(gate, "sigmoid")


def take_rows(x: Value, index: Value) -> Value:
    return take(x, index)


def clip(x: Value, *, low: float, high: float) -> Value:
    return x.made(ops.clamp(x.output, low, high))


def all_reduce(x: Value, *, axis: str) -> Value:  # noqa: ARG001
    return x


def all_gather(x: Value, *, axis: str) -> Value:  # noqa: ARG001
    return x


def zeros_like(x: Value) -> Value:
    return x * 0.0


class Hosted:
    """A kernel's function that computes the body of its op on arrays of the host."""

    def __init__(self, op: str) -> None:
        self._op = op

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        return tree_map(in_float32, CATALOG[self._op].body(*args, **attrs))


class Traced:
    """A kernel's function: nodes of a graph, or, with arrays, a graph of its own.

    on_host: computes a call with arrays instead; ops that ``embed`` calls have it.
    """

    def __init__(
        self, run: Callable[..., Any], runtime: Runtime, on_host: Hosted | None
    ) -> None:
        self._run, self._runtime, self._on_host = run, runtime, on_host

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        if any(isinstance(leaf, Value) for leaf in leaves(args)):
            return self._run(*args, **attrs)
        if self._on_host is not None:
            return self._on_host(*args, **attrs)
        return evaluated(self._run, self._runtime, args, attrs)


def in_float32(x: Any) -> Any:
    """Return an array in float32 if it is of a wider float."""
    return x.astype(np.float32) if x.dtype == np.float64 else x


def kernels(
    runtime: Runtime, refuse: Callable[..., str | None] | None
) -> tuple[Kernel, ...]:
    """Return the kernels of a device.

    refuse: of attention, for graphs that lack a part of it.
    """
    return (
        *(Kernel(op, "host", Hosted(op)) for op in HOSTED),
        *(_kernel(run, runtime) for run in GRAPHED),
        _kernel(attention, runtime, **({"refuse": refuse} if refuse else {})),
        *(_packed(run, runtime) for run in (linear, qkv_linear, gated_mlp)),
    )


def _kernel(run: Callable[..., Any], runtime: Runtime, **more: Any) -> Kernel:
    """Return the kernel of a function, which is named as its op."""
    op = run.__name__
    on_host = Hosted(op) if op in EMBEDDING else None
    return Kernel(op, TECHNOLOGY, Traced(run, runtime, on_host), **more)


def _packed(run: Callable[..., Any], runtime: Runtime) -> Kernel:
    """Return the kernel of a function that takes codes of 4 or 8 bits."""
    op = run.__name__
    return Kernel(
        op, "codes", Traced(run, runtime, None), layout=LAYOUT,
        pack=packer(op, LAYOUT, lambda matrix, *_: codes_of(matrix)),
        can_pack=refuse_dtypes(*SPLIT), preference=1,
    )  # fmt: skip


GRAPHED: Final = (
    activate, all_gather, all_reduce, clip, gated_activation, layer_norm, linear,
    rms_norm, rope, sigmoid_gate, silu, soft_cap, take_rows, write_kv, zeros_like,
)  # fmt: skip
"""Functions named as their ops; attention is added."""
