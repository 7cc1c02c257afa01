"""Activations that gated layers do not fuse."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from inl.errors import RequestError
from inl.spec.op import Case, Spec, elements, op
from inl.spec.step import Array

KINDS: Final = (
    "silu", "gelu_tanh", "gelu", "gelu_sigmoid", "relu", "relu_squared", "sigmoid",
    "tanh",
)  # fmt: skip
"""Accepted values of the ``kind`` attribute."""

_erf = np.vectorize(math.erf, otypes=[np.float64])


def check_kind(kind: str) -> None:
    """Raise :class:`RequestError` for an unknown kind."""
    if kind not in KINDS:
        raise RequestError(
            f"activate: kind: found {kind!r:.80}, accepted: {', '.join(KINDS)}"
        )


def _shapes(x: Spec, *, kind: str) -> Spec:
    check_kind(kind)
    return Spec(x.shape, x.dtype)


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    x = np.concatenate([3 * rng.standard_normal((4, 40)), np.zeros((1, 40))])
    edge = np.array([[-100.0, -20.0, 0.0, 20.0, 100.0]])
    for kind in KINDS:
        yield Case(kind, (x,), {"kind": kind})
        yield Case(f"{kind}/edges", (edge,), {"kind": kind})


@op(shapes=_shapes, cases=_cases, flops=lambda x, **_: 8 * elements(x), since=(1, 2))
def activate(x: Array, *, kind: str) -> Array:
    """Activation of each element of ``x``, in float32.

    kind: "silu"; "gelu" (with the error function), "gelu_tanh" or "gelu_sigmoid" (its
    approximations: Hendrycks and Gimpel, 2016); "relu"; "relu_squared"; "sigmoid"; or
    "tanh". Raises :class:`~inl.errors.RequestError` for another one.
    """
    check_kind(kind)
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "relu_squared":
        return np.square(np.maximum(x, 0))
    if kind == "tanh":
        return np.tanh(x)
    if kind == "sigmoid":
        return _sigmoid(x)
    if kind == "gelu":
        return 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype))
    if kind == "gelu_tanh":
        return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * _sigmoid(x if kind == "silu" else 1.702 * x)


def _sigmoid(x: Any) -> Any:
    # Without overflow, and without cancellation for very negative x.
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1) / (1 + small)
