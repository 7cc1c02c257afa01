"""Rotary position embedding (Su et al., 2021), half-split as Hugging Face has it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Spec, op
from inl.spec.step import Array


class RopeScaling(NamedTuple):
    """How frequencies are stretched for contexts longer than those trained on."""

    kind: str = "none"
    """"none"; "linear"; "llama3" (Llama 3.1: long waves slowed, short ones kept);
    "yarn" (Peng et al., 2023); "divided" (LongRoPE: a divisor for each plane)."""
    factor: float = 1.0
    low: float = 1.0
    """Planes that turn fewer times than this within ``original`` are slowed."""
    high: float = 4.0
    """Planes that turn more often than this are kept."""
    original: int = 8192
    """Tokens of the context trained on."""
    divisors: tuple[float, ...] = ()
    """One for each plane that turns, for "divided"."""
    gain: float = 1.0
    """Length that a unit vector has after turning: YaRN's and LongRoPE's warmth."""
    turning: int = 0
    """Lanes of a head that turn, 0 for all: the planes of the others come last."""


def frequencies(dim: int, theta: float, scaling: RopeScaling) -> Any:
    """Angle per position of each of the ``dim // 2`` planes, float64; 0 holds still."""
    turning = scaling.turning or dim
    rates = theta ** (-np.arange(0, turning, 2, dtype=np.float64) / turning)
    still = np.zeros((dim - turning) // 2)
    return np.concatenate([_scaled(rates, theta, scaling), still])


def gains(dim: int, scaling: RopeScaling) -> Any:
    """Length of each plane's cosine and sine, float64 [dim / 2]."""
    turning = (scaling.turning or dim) // 2
    return np.where(np.arange(dim // 2) < turning, scaling.gain, 1.0)


def _scaled(rates: Any, theta: float, scaling: RopeScaling) -> Any:
    if scaling.kind == "linear":
        return rates / scaling.factor
    if scaling.kind == "divided":
        return rates / np.array(scaling.divisors)
    if scaling.kind in ("llama3", "yarn"):
        kept = _ramp(rates, theta, scaling)
        return kept * rates + (1 - kept) * rates / scaling.factor
    return rates


def _ramp(rates: Any, theta: float, scaling: RopeScaling) -> Any:
    """Share of each frequency that is kept: by turns, or by places for "yarn"."""
    if scaling.kind == "llama3":
        turns = scaling.original * rates / (2 * math.pi)
        return np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    count = int(rates.shape[0])

    def place(turns: float) -> float:
        waves = math.log(scaling.original / (turns * 2 * math.pi))
        return count * waves / math.log(theta)

    first = max(math.floor(place(scaling.high)), 0)
    last = min(math.ceil(place(scaling.low)), 2 * count - 1)
    wide = last - first or 0.001
    return 1 - np.clip((np.arange(count) - first) / wide, 0, 1)


def _table_cases(_rng: np.random.Generator) -> Iterable[Case]:
    positions = np.array([0, 1, 2, 77, 8191], np.int32)
    for scaling in (
        RopeScaling(),
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0),
        RopeScaling("yarn", 4.0, 1.0, 32.0, 2048, gain=1.14),
        RopeScaling("divided", divisors=(1.0, 1.5, 4.0), gain=1.2, turning=6),
    ):
        attrs = {"dim": 16, "theta": 10000.0, "scaling": scaling}
        yield Case(scaling.kind, (positions,), attrs)


def _table_shapes(positions: Spec, *, dim: int, **_: Any) -> tuple[Spec, Spec]:
    table = Spec((*positions.shape, dim // 2), "float32")
    return table, table


@op(shapes=_table_shapes, cases=_table_cases, rounds=False)
def rope_table(
    positions: Array, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[Array, Array]:
    """Cosines and sines for ``positions`` [T]: two of float32 [T, dim / 2].

    Planes that do not turn have the cosine 1 and the sine 0.
    """
    angles = positions[:, None] * frequencies(dim, theta, scaling)
    length = gains(dim, scaling)
    return np.cos(angles) * length, np.sin(angles) * length


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
def rope(q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Rotate queries [T, heads, d] and keys [T, kv_heads, d] by cos, sin [T, d / 2]."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
