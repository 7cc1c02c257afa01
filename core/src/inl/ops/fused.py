"""Regions of a decoder that a backend may compute in one launch.

Each body is the ops that it fuses, one after the other, and a backend without a kernel
for the region computes those. ``w`` reaches its op unopened, however it is packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops.attention import SHAPES, attention_case
from inl.ops.linear import Linear, QkvLinear, product_flops
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl.spec.op import Case, op
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES = ((1, 40, 72), (1, 96, 577), (3, 48, 160), (17, 64, 48))
"""Tokens, outputs and inputs."""


def _flops(residual: Any, _delta: Any, *rest: Any, **_: Any) -> int:
    return product_flops(residual, rest[-1])


def _sums(rng: np.random.Generator, tokens: int, width: int) -> tuple[Any, Any, Norm]:
    residual, delta = rng.standard_normal((2, tokens, width))
    return 3 * residual, delta, Norm(rng.standard_normal(width))


def _qkv_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, n, k in SIZES:
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
    """Add the ranks' ``delta``, normalize, and make queries, keys and values.

    residual, delta: [T, H]. Returns the new residual [T, H] and three of [T, N].
    """
    residual, x = ops.reduce_add_norm(residual, delta, norm, eps=eps)
    q, k, v = ops.qkv_linear(x, w)
    return residual, q, k, v


def _mlp_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, n, k in SIZES:
        gate, up = rng.standard_normal((2, n, k)) / k**0.5
        for activation in ("silu", "gelu_tanh"):
            w = GatedMlp(gate, up, rng.standard_normal((k, n)))
            attrs = {"eps": 1e-5, "activation": activation}
            name = f"{tokens}x{n}x{k}/{activation}"
            yield Case(name, (*_sums(rng, tokens, k), w), attrs)


@op(
    cases=_mlp_cases,
    weights=GatedMlp,
    flops=_flops,
    layout_opaque=True,
    reduces="delta",
)
def norm_mlp(
    ops: Ops, residual: Array, delta: Array, norm: Norm, w: GatedMlp, *, eps: float,
    activation: str,
) -> tuple[Array, Array]:  # fmt: skip
    """Add the ranks' ``delta``, normalize, and apply the gated feed-forward layer.

    residual, delta: [T, H]. Returns the new residual and this rank's part, [T, H].
    """
    residual, x = ops.reduce_add_norm(residual, delta, norm, eps=eps)
    return residual, ops.gated_mlp(x, w, activation=activation)


def _logit_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, n, k in SIZES:
        rows = rng.integers(0, tokens, min(tokens, 4)).astype(np.int32)
        residual, delta, norm = _sums(rng, tokens, k)
        w = Linear(rng.standard_normal((n, k)))
        args = (residual, delta, rows, norm, w)
        yield Case(f"{tokens}x{n}x{k}", args, {"eps": 1e-6})


@op(
    cases=_logit_cases,
    weights=Linear,
    flops=_flops,
    layout_opaque=True,
    reduces="delta",
)
def norm_logits(
    ops: Ops, residual: Array, delta: Array, samples: Array, norm: Norm, w: Linear, *,
    eps: float,
) -> Array:  # fmt: skip
    """Take the rows ``samples`` [S], add the ranks' ``delta``, normalize, and score.

    residual, delta: [T, H]. Returns logits [S, V], this rank's part of them.
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
    """Case ``name`` of attention, with keys, values, rotation and projection."""
    heads, kv_heads, dim = dims
    case = attention_case(rng, name, dims, attrs)
    q, cache, step = case.args
    k, v = rng.standard_normal((2, q.shape[0], kv_heads, dim))
    k[step.used_counts[2] :] = v[step.used_counts[2] :] = (
        0  # they write one cell, in any order
    )
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


def _attend_flops(q: Any, *rest: Any, **_: Any) -> int:
    longest = rest[5].blocks.shape[-1] * rest[4].k.shape[1]
    attended = 4 * int(np.prod(q.shape)) * int(longest)
    return attended + 2 * int(q.shape[0]) * int(np.prod(rest[-1].weight.shape))


@op(
    cases=_attend_cases,
    weights=Linear,
    consumes=("cache",),
    flops=_attend_flops,
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
    """Rotate q and k, cache k and v, attend, and project what the heads found.

    q: [T, heads, d]; k, v: [T, kv_heads, d]; cos, sin: [T, d / 2] float32.
    Returns this rank's part [T, H] and the cache.
    """
    q, k = ops.rope(q, k, cos, sin)
    out, cache = ops.attend(
        q, k, v, cache, step, scale=scale, window=window, cap=cap, group=group
    )
    return ops.linear(out.reshape(out.shape[0], -1), w), cache
