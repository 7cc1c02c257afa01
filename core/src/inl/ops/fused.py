"""Fused regions of a decoder layer, which a backend may compute in one launch.

Each body calls the fused ops in order; a backend without a kernel for the region runs
the body. ``w`` may be packed, since the body passes it on without reading its fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops.attention import (
    SHAPES,
    attend_traffic,
    attention_case,
    attention_flops,
)
from inl.ops.linear import Linear, QkvLinear, product_flops
from inl.ops.mlp import GatedMlp, mlp_flops
from inl.ops.norm import Norm, add_norm_flops
from inl.ops.rope import rope_flops
from inl.spec.cache import Cache
from inl.spec.op import Case, Sizes, Spec, nbytes, op, stored_nbytes
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES = ((1, 40, 72), (1, 96, 577), (3, 48, 160), (17, 64, 48))
"""(tokens, outputs, inputs) of the cases."""


def _flops(residual: Any, _delta: Any, _norm: Any, w: Any, **_: Any) -> int:
    return add_norm_flops(residual) + product_flops(residual, w)


def _sums(rng: np.random.Generator, tokens: int, width: int) -> tuple[Any, Any, Norm]:
    residual, delta = rng.standard_normal((2, tokens, width))
    return 3 * residual, delta, Norm(rng.standard_normal(width))


def _qkv_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, n, k in sizes:
        parts = [rng.standard_normal((size, k)) for size in (3 * n, n, n)]
        biases = [rng.standard_normal(size) for size in (3 * n, n, n)]
        for name, w in (("", QkvLinear(*parts)), ("/bias", QkvLinear(*parts, *biases))):
            args = (*_sums(rng, tokens, k), w)
            yield Case(f"{tokens}x{n}x{k}{name}", args, {"eps": 1e-5})


@op(
    cases=_qkv_cases,
    weights=QkvLinear,
    flops=_flops,
    layout_opaque=True,
    reduces="delta",
)
def norm_qkv(
    ops: Ops, residual: Array, delta: Array, norm: Norm, w: QkvLinear, *, eps: float
) -> tuple[Array, Array, Array, Array]:
    """Reduce and add ``delta``, normalize, and project to queries, keys, values.

    residual, delta: [T, H]. Returns the new residual [T, H] and three of [T, N].
    """
    residual, x = ops.reduce_add_norm(residual, delta, norm, eps=eps)
    q, k, v = ops.qkv_linear(x, w)
    return residual, q, k, v


def _mlp_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, n, k in sizes:
        gate, up = rng.standard_normal((2, n, k)) / k**0.5
        for activation in ("silu", "gelu_tanh"):
            w = GatedMlp(gate, up, rng.standard_normal((k, n)))
            attrs = {"eps": 1e-5, "activation": activation}
            name = f"{tokens}x{n}x{k}/{activation}"
            yield Case(name, (*_sums(rng, tokens, k), w), attrs)


def _mlp_flops(
    residual: Any, _delta: Any, _norm: Any, w: Any, *, activation: str, **_: Any
) -> int:
    return add_norm_flops(residual) + mlp_flops(residual, w, activation=activation)


@op(
    cases=_mlp_cases,
    weights=GatedMlp,
    flops=_mlp_flops,
    layout_opaque=True,
    reduces="delta",
)
def norm_mlp(
    ops: Ops, residual: Array, delta: Array, norm: Norm, w: GatedMlp, *, eps: float,
    activation: str,
) -> tuple[Array, Array]:  # fmt: skip
    """Reduce and add ``delta``, normalize, and apply the gated feed-forward layer.

    residual, delta: [T, H]. Returns the new residual and this rank's partial sum of the
    layer, both [T, H].
    """
    residual, x = ops.reduce_add_norm(residual, delta, norm, eps=eps)
    return residual, ops.gated_mlp(x, w, activation=activation)


def _logit_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, n, k in sizes:
        rows = rng.integers(0, tokens, min(tokens, 4)).astype(np.int32)
        residual, delta, norm = _sums(rng, tokens, k)
        w = Linear(rng.standard_normal((n, k)))
        args = (residual, delta, rows, norm, w)
        yield Case(f"{tokens}x{n}x{k}", args, {"eps": 1e-6})


def _logit_flops(
    residual: Any, _delta: Any, samples: Any, _norm: Any, w: Any, **_: Any
) -> int:
    rows = Spec((*samples.shape, residual.shape[-1]), residual.dtype)
    return add_norm_flops(rows) + product_flops(rows, w)


def _logit_traffic(
    logits: Any, residual: Any, _delta: Any, samples: Any, norm: Any, w: Any, **_: Any
) -> int:
    rows = Spec((*samples.shape, residual.shape[-1]), residual.dtype)
    return nbytes((logits, rows, rows, samples)) + stored_nbytes((norm, w))


@op(
    cases=_logit_cases,
    weights=Linear,
    flops=_logit_flops,
    traffic=_logit_traffic,
    layout_opaque=True,
    reduces="delta",
)
def norm_logits(
    ops: Ops, residual: Array, delta: Array, samples: Array, norm: Norm, w: Linear, *,
    eps: float,
) -> Array:  # fmt: skip
    """Gather sampled rows, reduce and add ``delta``, normalize, compute logits.

    residual, delta: [T, H]. samples: int32 [S] rows. Returns logits [S, N] of this
    rank's share of the vocabulary.
    """
    residual = ops.take_rows(residual, samples)
    delta = ops.take_rows(delta, samples)
    _, x = ops.reduce_add_norm(residual, delta, norm, eps=eps)
    return ops.linear(x, w)


def attend_case(
    rng: np.random.Generator,
    name: str,
    dims: tuple[int, int, int],
    attrs: dict[str, Any],
) -> Case:
    """Return an attention case with keys, values, rotation and projection."""
    heads, kv_heads, dim = dims
    case = attention_case(rng, name, dims, attrs)
    q, cache, step = case.args
    k, v = rng.standard_normal((2, q.shape[0], kv_heads, dim))
    # Padding tokens all write to position 0, in any order: give them one value.
    k[step.used_counts[2] :] = v[step.used_counts[2] :] = 0
    angle = rng.uniform(0, 100, (q.shape[0], dim // 2))
    w = Linear(rng.standard_normal((24, heads * dim)))
    args = (q, k, v, np.cos(angle), np.sin(angle), cache, step, w)
    return Case(case.name, args, case.attrs)


def _attend_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, *_ in SHAPES:
        yield attend_case(rng, name, (6, 2, 16), {})
    yield attend_case(rng, "decode", (9, 3, 64), {})
    yield attend_case(rng, "decode", (4, 1, 8), {"window": 3})
    yield attend_case(rng, "decode", (4, 4, 128), {"cap": 2.0})


def _rotated_cases(rng: np.random.Generator) -> Iterable[Case]:
    for case in _attend_cases(rng):
        yield Case(case.name, case.args[:-1], case.attrs)


def _rotated_flops(
    q: Any, k: Any, _v: Any, _cos: Any, _sin: Any, cache: Any, step: Any, **attrs: Any
) -> int:
    return rope_flops(q, k) + attention_flops(q, cache, step, **attrs)


def _rotated_traffic(
    results: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, cache: Any, step: Any,
    **attrs: Any,
) -> int:  # fmt: skip
    attended = attend_traffic(results, q, k, v, cache, step, **attrs)
    return attended + nbytes((cos, sin))


@op(
    cases=_rotated_cases,
    consumes=("cache",),
    flops=_rotated_flops,
    traffic=_rotated_traffic,
    since=(1, 2),
)
def rope_attend(
    ops: Ops,
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    cache: Cache,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    group: int = 0,
) -> tuple[Array, Cache]:
    """Rotate, write to the cache and compute attention.

    q: [T, heads, d]. k, v: [T, kv_heads, d]. cos, sin: float32 [T, d / 2]. Returns
    the result [T, heads, d] and the cache.
    """
    q, k = ops.rope(q, k, cos, sin)
    return ops.attend(
        q, k, v, cache, step, scale=scale, window=window, cap=cap, group=group
    )


def _attend_flops(
    q: Any, k: Any, _v: Any, _cos: Any, _sin: Any, cache: Any, step: Any, w: Any,
    **attrs: Any,
) -> int:  # fmt: skip
    heads = Spec((q.shape[0], int(math.prod(q.shape[1:]))), q.dtype)
    attended = attention_flops(q, cache, step, **attrs)
    return rope_flops(q, k) + attended + product_flops(heads, w)


def _attend_traffic(
    results: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, cache: Any, step: Any,
    w: Any, **attrs: Any,
) -> int:  # fmt: skip
    attended = attend_traffic(results, q, k, v, cache, step, **attrs)
    return attended + nbytes((cos, sin)) + stored_nbytes(w)


@op(
    cases=_attend_cases,
    weights=Linear,
    consumes=("cache",),
    flops=_attend_flops,
    traffic=_attend_traffic,
    layout_opaque=True,
)
def attend_project(
    ops: Ops,
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    cache: Cache,
    step: Step,
    w: Linear,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    group: int = 0,
) -> tuple[Array, Cache]:
    """Rotate, write to the cache, compute attention and project the result.

    q: [T, heads, d]. k, v: [T, kv_heads, d]. cos, sin: float32 [T, d / 2]. Returns
    this rank's partial sum of the projection, [T, H], and the cache.
    """
    out, cache = ops.rope_attend(
        q, k, v, cos, sin, cache, step, scale=scale, window=window, cap=cap,
        group=group,
    )  # fmt: skip
    return ops.linear(out.reshape(out.shape[0], -1), w), cache
