"""Cases with long sums, which a kernel that adds in a half dtype fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from inl.ops.attention import random_step
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.moe import ExpertLinear
from inl.ops.norm import LayerNorm, Norm
from inl.ops.sink_attention import Sinks
from inl.spec.cache import Cache

Rng = np.random.Generator
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and attributes of a case."""

TERMS = 2048
"""Number of terms of long sums. They are positive: in bfloat16 such a sum stops growing
after 256 terms, and is wrong even if every 8 products are added in float32."""


def _positive(rng: Rng, *shape: int) -> Any:
    return np.abs(rng.standard_normal(shape))


def _norm(rng: Rng, w: Any, **attrs: Any) -> Inputs:
    x = _positive(rng, 2, 3, TERMS)
    return (*x, Norm(_positive(rng, TERMS)), w), {"eps": 1e-5, **attrs}


def _logits(rng: Rng) -> Inputs:
    (*sums, norm, w), attrs = _norm(rng, Linear(_positive(rng, 48, TERMS)))
    return (*sums, np.arange(3, dtype=np.int32), norm, w), attrs


def _qkv(rng: Rng) -> QkvLinear:
    return QkvLinear(*(_positive(rng, size, TERMS) for size in (64, 32, 32)))


def _mlp(rng: Rng) -> GatedMlp:
    gate, up = _positive(rng, 2, 96, TERMS) / TERMS
    return GatedMlp(gate, up, _positive(rng, TERMS, 96))


def _experts(rng: Rng) -> Inputs:
    ids = rng.integers(0, 4, (5, 2)).astype(np.int32)
    w = ExpertLinear(_positive(rng, 4, 48, TERMS))
    return (_positive(rng, 5, 2, TERMS), ids, w), {}


def _attention(rng: Rng) -> Inputs:
    """Equal scores, so that a result is a mean of positive values."""
    step, blocks = random_step(rng, [TERMS - 1], [1])
    cache = Cache(*_positive(rng, 2, blocks, 4, 1, 16))
    attrs = {"scale": 0.25, "window": None, "cap": None, "group": 0}
    return (np.zeros((1, 2, 16)), cache, step), attrs


def _sink_attention(rng: Rng) -> Inputs:
    args, attrs = _attention(rng)
    given = {key: value for key, value in attrs.items() if key != "cap"}
    return (*args, Sinks(np.zeros(2))), given


def _pool(rng: Rng) -> Inputs:
    starts = np.array([0, TERMS], np.int32)
    return (_positive(rng, TERMS, 8), starts), {"kind": "mean"}


SILU = {"activation": "silu"}

LONG_SUMS: dict[str, Callable[[Rng], Inputs]] = {
    "linear": lambda rng: (
        (_positive(rng, 3, TERMS), Linear(_positive(rng, 48, TERMS))),
        {},
    ),
    "qkv_linear": lambda rng: ((_positive(rng, 3, TERMS), _qkv(rng)), {}),
    "gated_mlp": lambda rng: ((_positive(rng, 3, TERMS), _mlp(rng)), SILU),
    "norm_qkv": lambda rng: _norm(rng, _qkv(rng)),
    "norm_mlp": lambda rng: _norm(rng, _mlp(rng), **SILU),
    "norm_logits": _logits,
    "expert_linear": _experts,
    "attention": _attention,
    "sink_attention": _sink_attention,
    "pool": _pool,
    "layer_norm": lambda rng: (
        (_positive(rng, 3, TERMS), LayerNorm(_positive(rng, TERMS))),
        {"eps": 1e-5},
    ),
    "rms_norm": lambda rng: (
        (_positive(rng, 3, TERMS), Norm(_positive(rng, TERMS))),
        {"eps": 1e-5},
    ),
}
"""Inputs with long sums, by op."""
