"""Root-mean-square normalization (Zhang and Sennrich, 2019), with fused sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Sizes, Spec, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES = ((1, 1), (3, 16), (5, 577))
"""(rows, width) of the cases of :data:`rms_norm`."""
FUSED_SIZES = ((1, 8), (6, 96))
"""(rows, width) of the cases of the fused norms."""


class Norm(NamedTuple):
    """Parameters of :data:`rms_norm`."""

    weight: Array
    """[H]."""


def norm_flops(x: Any, *_: Any, **__: Any) -> int:
    """Square, sum, scale and weight: 4 per element."""
    return 4 * elements(x)


def add_norm_flops(residual: Any, *_: Any, **__: Any) -> int:
    """One addition more than :func:`norm_flops` per element."""
    return 5 * elements(residual)


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for rows, width in sizes:
        for scale in (1e-4, 1.0, 100.0):
            x = scale * rng.standard_normal((rows, width))
            w = Norm(rng.standard_normal(width))
            yield Case(f"{rows}x{width}/{scale:g}", (x, w), {"eps": 1e-5})
    heads = rng.standard_normal((4, 3, 8))
    yield Case("heads", (heads, Norm(rng.standard_normal(8))), {"eps": 1e-6})
    yield Case("zeros", (np.zeros((2, 8)), Norm(np.ones(8))), {"eps": 1e-6})


@op(
    shapes=lambda x, w, *, eps: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=_cases,
    weights=Norm,
    flops=norm_flops,
)
def rms_norm(x: Array, w: Norm, *, eps: float) -> Array:
    """``x / sqrt(mean(x^2) + eps) * w.weight`` over the last axis.

    x: [..., H]. Computed in float32.
    """
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean + eps) * w.weight


def _fused_cases(
    rng: np.random.Generator, sizes: Sizes = FUSED_SIZES
) -> Iterable[Case]:
    for rows, width in sizes:
        residual, delta = rng.standard_normal((2, rows, width))
        w = Norm(rng.standard_normal(width))
        yield Case(f"{rows}x{width}", (residual, delta, w), {"eps": 1e-5})


@op(cases=_fused_cases, weights=Norm, flops=add_norm_flops, reduces="delta")
def reduce_add_norm(
    ops: Ops, residual: Array, delta: Array, w: Norm, *, eps: float
) -> tuple[Array, Array]:
    """Reduce ``delta`` over ranks, add it to ``residual`` and normalize the sum.

    residual, delta: [T, H]. Returns the new residual and the normalized one.
    """
    residual = residual + ops.all_reduce(delta, axis="tensor")
    return residual, ops.rms_norm(residual, w, eps=eps)


@op(cases=_fused_cases, weights=Norm, flops=add_norm_flops)
def add_norm(
    ops: Ops, residual: Array, delta: Array, w: Norm, *, eps: float
) -> tuple[Array, Array]:
    """Add ``delta`` to ``residual`` and normalize the sum, without a reduction.

    residual, delta: [T, H], already reduced over ranks. Returns the new residual and
    the normalized one.
    """
    residual = residual + delta
    return residual, ops.rms_norm(residual, w, eps=eps)


def _after_cases(rng: np.random.Generator) -> Iterable[Case]:
    for rows, width in ((1, 8), (6, 96)):
        w = Norm(rng.standard_normal(width))
        x = rng.standard_normal((rows, width))
        yield Case(f"{rows}x{width}", (x, w), {"eps": 1e-6})


@op(cases=_after_cases, weights=Norm, flops=norm_flops, reduces="delta")
def reduce_norm(ops: Ops, delta: Array, w: Norm, *, eps: float) -> Array:
    """Reduce ``delta`` [T, H] over ranks and normalize the sum."""
    return ops.rms_norm(ops.all_reduce(delta, axis="tensor"), w, eps=eps)


class LayerNorm(NamedTuple):
    """Parameters of :data:`layer_norm`."""

    weight: Array
    """[H]."""
    bias: Array | None = None
    """[H]."""


def _layer_norm_cases(rng: np.random.Generator) -> Iterable[Case]:
    for rows, width in ((1, 2), (3, 16), (5, 577)):
        x = 3 * rng.standard_normal((rows, width)) + 1
        weight, bias = rng.standard_normal((2, width))
        for name, w in (("", LayerNorm(weight)), ("/bias", LayerNorm(weight, bias))):
            yield Case(f"{rows}x{width}{name}", (x, w), {"eps": 1e-5})
    yield Case("zeros", (np.zeros((2, 8)), LayerNorm(np.ones(8))), {"eps": 1e-6})


@op(
    shapes=lambda x, w, *, eps: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=_layer_norm_cases,
    weights=LayerNorm,
    flops=lambda x, *_, **__: 7 * elements(x),
    since=(1, 2),
)
def layer_norm(x: Array, w: LayerNorm, *, eps: float) -> Array:
    """``(x - mean(x)) / sqrt(var(x) + eps) * w.weight + w.bias`` over the last axis.

    x: [..., H]. w.bias: [H] or ``None``. Computed in float32 (Ba et al., 2016).
    """
    centered = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centered), axis=-1, keepdims=True)
    y = centered / np.sqrt(variance + eps) * w.weight
    return y if w.bias is None else y + w.bias
