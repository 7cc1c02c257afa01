"""Linear layers with packed weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.spec.kernel import Kernel
from inl.weights.packing import packer, refuse_dtypes
from inl_jax.pallas.matmul import matmul
from inl_jax.pallas.packed import KINDS, PACKED, pack_matrix
from inl_jax.tensors import Array
from inl_jax.xla.kernel import inlined
from inl_jax.xla.layers import gated_activation


def linear(x: Array, w: Linear, *, interpret: Any = False) -> Array:
    return matmul(x, w.weight, w.bias, interpret=interpret)


def qkv_linear(
    x: Array, w: QkvLinear, *, interpret: Any = False
) -> tuple[Array, Array, Array]:
    pairs = ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias))
    q, k, v = (matmul(x, matrix, bias, interpret=interpret) for matrix, bias in pairs)
    return q, k, v


def gated_mlp(
    x: Array, w: GatedMlp, *, activation: str, interpret: Any = False
) -> Array:
    gate, up = (matmul(x, each, interpret=interpret) for each in (w.gate, w.up))
    inner = gated_activation(gate, up, activation=activation)
    return matmul(inner, w.down, interpret=interpret)


def refuse(x: Any, *_: Any, **__: Any) -> str | None:
    """Refuse dtypes that the matrix unit does not multiply."""
    if x.dtype not in ("bfloat16", "float32"):
        return f"takes bfloat16 and float32, found {x.dtype}"
    return None


def kernels(interpret: Any = False) -> Iterable[Kernel]:
    """Return the kernels; ``interpret`` simulates them on the CPU."""
    for run in (linear, qkv_linear, gated_mlp):
        yield Kernel(
            run.__name__,
            "pallas",
            partial(inlined(run), interpret=interpret),
            refuse,
            layout=PACKED,
            pack=packer(run.__name__, PACKED, pack_matrix),
            can_pack=refuse_dtypes(*KINDS),
            preference=10,
        )
