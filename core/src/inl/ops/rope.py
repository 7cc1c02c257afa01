"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face.

A head of ``dim`` lanes has ``dim // 2`` planes; plane i rotates lanes i and
``i + dim // 2``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Sizes, Spec, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES = ((1, 1, 1, 2), (5, 9, 3, 64), (3, 4, 4, 128))
"""(tokens, heads, kv_heads, head_dim) of the cases of :data:`rope`."""


class RopeScaling(NamedTuple):
    """Scaling of rotation frequencies for contexts longer than in training."""

    kind: str = "none"
    """"none"; "linear"; "llama3" (Llama 3.1: divides low frequencies only); "yarn"
    (Peng et al., 2023); "divided" (LongRoPE: one divisor per plane)."""
    factor: float = 1.0
    """Divisor of the scaled frequencies."""
    low: float = 1.0
    """Planes with fewer rotations than this within ``original`` tokens are scaled."""
    high: float = 4.0
    """Planes with more rotations than this are not scaled."""
    original: int = 8192
    """Context length in training, in tokens."""
    divisors: tuple[float, ...] = ()
    """One per rotating plane, for "divided"."""
    gain: float = 1.0
    """Factor on cosines and sines: the attention factor of YaRN and LongRoPE."""
    rotary_dim: int = 0
    """Lanes of a head that rotate; 0 is all. Planes that do not rotate come last."""
    whole_planes: bool = True
    """Whether the ramp of "yarn" begins and ends at whole planes."""
    axes: tuple[int, ...] = ()
    """Axis of the position by which each rotating plane turns, where tokens have
    positions along several axes (Wang et al., 2024); empty: all by the only one. A
    table of positions along one axis does not depend on it."""


def frequencies(dim: int, theta: float, scaling: RopeScaling) -> Any:
    """Return the angle per position of each plane: float64 [dim / 2].

    0 for planes that do not rotate.
    """
    rotary_dim = scaling.rotary_dim or dim
    rates = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    unrotated = np.zeros((dim - rotary_dim) // 2)
    return np.concatenate([_scaled(rates, theta, scaling), unrotated])


def gains(dim: int, scaling: RopeScaling) -> Any:
    """Return the factor on each plane's cosine and sine: float64 [dim / 2]."""
    planes = (scaling.rotary_dim or dim) // 2
    return np.where(np.arange(dim // 2) < planes, scaling.gain, 1.0)


def _scaled(rates: Any, theta: float, scaling: RopeScaling) -> Any:
    if scaling.kind == "linear":
        return rates / scaling.factor
    if scaling.kind == "divided":
        return rates / np.array(scaling.divisors)
    if scaling.kind in ("llama3", "yarn"):
        share = _unscaled_share(rates, theta, scaling)
        return share * rates + (1 - share) * rates / scaling.factor
    return rates


def _unscaled_share(rates: Any, theta: float, scaling: RopeScaling) -> Any:
    """Return the weight of each plane's unscaled frequency, in 0 .. 1.

    A linear ramp over the number of rotations, or over the plane index for "yarn".
    """
    if scaling.kind == "llama3":
        turns = scaling.original * rates / (2 * math.pi)
        return np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    count = int(rates.shape[0])

    def plane(turns: float) -> float:
        wavelength = scaling.original / (turns * 2 * math.pi)
        return count * math.log(wavelength) / math.log(theta)

    first, last = plane(scaling.high), plane(scaling.low)
    if scaling.whole_planes:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    span = last - first or 0.001
    return 1 - np.clip((np.arange(count) - first) / span, 0, 1)


def _table_cases(_rng: np.random.Generator) -> Iterable[Case]:
    positions = np.array([0, 1, 2, 77, 8191], np.int32)
    for scaling in (
        RopeScaling(),
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0),
        RopeScaling("yarn", 4.0, 1.0, 32.0, 2048, gain=1.14),
        RopeScaling("yarn", 4.0, 1.0, 32.0, 2048, whole_planes=False),
        RopeScaling("divided", divisors=(1.0, 1.5, 4.0), gain=1.2, rotary_dim=6),
    ):
        attrs = {"dim": 16, "theta": 10000.0, "scaling": scaling}
        yield Case(_case_name(scaling), (positions,), attrs)


def _case_name(scaling: RopeScaling) -> str:
    return scaling.kind if scaling.whole_planes else f"{scaling.kind}, part of a plane"


def _table_shapes(positions: Spec, *, dim: int, **_: Any) -> tuple[Spec, Spec]:
    table = Spec((*positions.shape, dim // 2), "float32")
    return table, table


@op(shapes=_table_shapes, cases=_table_cases, rounds=False)
def rope_table(
    positions: Array, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[Array, Array]:
    """Cosines and sines of ``positions`` [T]: two of float32 [T, dim / 2].

    Planes that do not rotate have cosine 1 and sine 0.
    """
    angles = positions[:, None] * frequencies(dim, theta, scaling)
    length = gains(dim, scaling)
    return np.cos(angles) * length, np.sin(angles) * length


def _axis_cases(rng: np.random.Generator) -> Iterable[Case]:
    positions = rng.integers(0, 900, (3, 7)).astype(np.int32)
    for name, scaling in (
        ("sections", RopeScaling(axes=(0, 0, 1, 1, 1, 2, 2, 2))),
        ("interleaved", RopeScaling(axes=(0, 1, 2, 0, 1, 2, 0, 0))),
        ("yarn", RopeScaling("yarn", 4.0, 1.0, 32.0, 2048, gain=1.14,
                             axes=(0, 0, 1, 1, 2, 2, 2, 2))),
        ("partial", RopeScaling(rotary_dim=8, axes=(0, 1, 1, 2))),
    ):  # fmt: skip
        yield Case(name, (positions,), {"dim": 16, "theta": 1e4, "scaling": scaling})


@op(cases=_axis_cases, rounds=False)
def axis_rope_table(
    ops: Ops, positions: Array, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[Array, Array]:
    """:data:`rope_table` of ``positions`` [axes, T] along several axes.

    Plane i turns by the positions along axis ``scaling.axes[i]``.
    """
    # A plane that does not turn along an axis has cosine 1 and sine 0 in its table, so
    # that products and sums of the tables of all axes have each plane's own.
    rates = frequencies(dim, theta, scaling)[: len(scaling.axes)]
    rotary_dim = 2 * len(scaling.axes)
    plain = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    tables = []
    for axis in range(positions.shape[0]):
        own = np.array(scaling.axes) == axis
        divisors = np.where(own, plain / rates, np.inf)
        turning = RopeScaling("divided", divisors=tuple(divisors.tolist()),
                              rotary_dim=scaling.rotary_dim)  # fmt: skip
        tables.append(
            ops.rope_table(positions[axis], dim=dim, theta=theta, scaling=turning)
        )
    cos, sin = tables[0]
    for other, also in tables[1:]:
        cos, sin = cos * other, sin + also
    if scaling.gain == 1.0:
        return cos, sin
    if scaling.rotary_dim not in (0, dim):
        raise ValueError("a gain of planes that do not all rotate")
    return cos * scaling.gain, sin * scaling.gain


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, heads, kv_heads, dim in sizes:
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


def rope_flops(q: Any, k: Any, *_: Any, **__: Any) -> int:
    """Two products and a sum per element."""
    return 3 * (elements(q) + elements(k))


@op(
    shapes=lambda q, k, cos, sin: (Spec(q.shape, q.dtype), Spec(k.shape, k.dtype)),  # noqa: ARG005
    cases=_cases,
    flops=rope_flops,
)
def rope(q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Rotate queries and keys by their positions.

    q: [T, heads, d]. k: [T, kv_heads, d]. cos, sin: float32 [T, d / 2], see
    :data:`rope_table`. Returns both, rotated.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
