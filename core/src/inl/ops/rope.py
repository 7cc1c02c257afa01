"""Rotary position embedding (Su et al., 2021), half-split as Hugging Face has it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Spec, op


class RopeScaling(NamedTuple):
    """How frequencies are stretched for contexts longer than those trained on."""

    kind: str = "none"
    """"none", "linear", or "llama3" (Llama 3.1: long waves slowed, short ones kept)."""
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


def frequencies(dim: int, theta: float, scaling: RopeScaling) -> Any:
    """Angle per position of each of the ``dim // 2`` planes, float64."""
    rates = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling.kind == "linear":
        return rates / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original * rates / (2 * math.pi)
        kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return kept * rates + (1 - kept) * rates / scaling.factor
    return rates


def _table_cases(_rng: np.random.Generator) -> Iterable[Case]:
    positions = np.array([0, 1, 2, 77, 8191], np.int32)
    for scaling in (
        RopeScaling(),
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0),
    ):
        attrs = {"dim": 16, "theta": 10000.0, "scaling": scaling}
        yield Case(scaling.kind, (positions,), attrs)


def _table_shapes(positions: Spec, *, dim: int, **_: Any) -> tuple[Spec, Spec]:
    table = Spec((*positions.shape, dim // 2), "float32")
    return table, table


@op(shapes=_table_shapes, cases=_table_cases, rounds=False)
def rope_table(
    positions: Any, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[Any, Any]:
    """Cosines and sines for ``positions`` [T]: two of float32 [T, dim / 2]."""
    angles = positions[:, None] * frequencies(dim, theta, scaling)
    return np.cos(angles), np.sin(angles)


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, heads, kv_heads, dim in ((1, 1, 1, 2), (5, 9, 3, 64), (3, 4, 4, 128)):
        q = rng.standard_normal((tokens, heads, dim))
        k = rng.standard_normal((tokens, kv_heads, dim))
        angle = rng.uniform(0, 100, (tokens, dim // 2))
        name = f"{tokens}x{heads}/{kv_heads}x{dim}"
        yield Case(name, (q, k, np.cos(angle), np.sin(angle)))


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@op(
    shapes=lambda q, k, cos, sin: (Spec(q.shape, q.dtype), Spec(k.shape, k.dtype)),  # noqa: ARG005
    cases=_cases,
)
def rope(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Rotate queries [T, heads, d] and keys [T, kv_heads, d] by cos, sin [T, d / 2]."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
