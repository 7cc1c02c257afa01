"""Selective state spaces over per-slot state: the scan of Mamba-2.

Rows begin, continue and end as those of :mod:`inl.ops.recurrent`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inl.ops.attention import random_step
from inl.ops.recurrent import (
    LENGTH_EPS,
    Decay,
    decided_queries,
    row_steps,
    table_traffic,
)
from inl.spec.op import Case, Sizes, elements, op
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES: Final = ((1, 1, 4, 6), (2, 4, 8, 5))
"""(groups, heads, d, n) of the cases of :data:`ssm_scan`."""
LONG: Final = [2, 0, 64, 0], [1, 65, 3, 67]
"""Cached tokens and tokens of rows, some of more than 64, the chunk of most kernels."""
SHORT: Final = 2.0**-50
"""Factor on keys and queries, a power of two so that no digit is lost."""
LENGTH: Final = SHORT * LENGTH_EPS**-0.5
"""Factor on keys and queries after the delta rule has scaled them."""


class Ssm(NamedTuple):
    """Parameters of :data:`ssm_scan`."""

    rate: Array
    """[heads] float32: logarithm of each head's rate."""
    shift: Array
    """[heads] float32, added to ``dt``."""
    bias: Array
    """[heads]: ``shift`` in the dtype of ``dt``, which the body reads."""
    skip: Array
    """[heads]: factor on ``x``, added to the results."""


def _steps(rng: np.random.Generator, *, long: bool) -> Iterable[tuple[str, Step]]:
    yield from row_steps(rng)
    if long:
        step, _ = random_step(rng, *LONG, pad_rows=1, pad_tokens=5)
        slots = np.append(rng.permutation(np.arange(1, 5)), 0).astype(np.int32)
        yield "long", step._replace(slots=slots)


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for groups, heads, dim, width in sizes:
        for name, step in _steps(rng, long=groups > 1):
            tokens = step.tokens.shape[0]
            x = rng.standard_normal((tokens, heads, width))
            b, c = rng.standard_normal((2, tokens, groups, dim))
            # What a token writes and reads does not cancel the skipped value.
            c = decided_queries(c, b)
            c = np.copysign(dim**-0.5, (b * c).sum(-1, keepdims=True)) * c
            dt = rng.standard_normal((tokens, heads))
            table = rng.standard_normal((6, heads, dim, width))
            rate, shift, skip = rng.standard_normal((3, heads))
            w = Ssm(rate, shift, shift, np.abs(skip))
            at = f"{name}/{groups}x{heads}"
            yield Case(at, (x, b, c, dt, table, step, w))
            # Some tokens leave nothing of the state before them.
            fast = np.where(rng.random(dt.shape) < 0.2, 50 * np.abs(dt), dt)
            w = w._replace(rate=rate + 1)
            yield Case(f"{at}/decays", (x, b, c, fast, table, step, w))


@op(
    cases=_cases,
    weights=Ssm,
    consumes=("table",),
    flops=lambda x, b, *_: 5 * elements(x) * b.shape[-1],
    traffic=table_traffic,
    # A query nearly orthogonal to what was written reads a small sum of large terms.
    tolerance=4.0,
    since=(2, 1),
    dtypes=("bfloat16", "float32", "float64"),
)
def ssm_scan(
    ops: Ops, x: Array, b: Array, c: Array, dt: Array, table: Array, step: Step, w: Ssm
) -> tuple[Array, Array]:
    """Scan of Mamba-2 (Dao and Gu, 2024): a decaying sum of outer products per head.

    x: [T, heads, n]; b, c: [T, groups, d], each shared by ``heads / groups`` adjacent
    heads; dt: [T, heads]; table: [slots, heads, d, n] float32, the matrix S of each
    sequence. For each token, in float32: ``time = softplus(dt + shift)``, ``S =
    exp(-exp(rate) * time) * S + outer(b, time * x)``. Returns ``c @ S + skip * x``,
    [T, heads, n], and the table.

    The body is the gated delta rule, which also takes away what a key reads. It scales
    keys to the length 1 with an epsilon under the root, so that keys of nearly no
    length keep theirs; what they read is then some 1e-24 of what they write. That takes
    the range of float32. ``softplus(dt) * x`` is the velocity of a step of INL dynamics
    from 0 toward ``x``.
    """
    heads, still = x.shape[1], ops.zeros_like(x)
    time = (dt + w.bias).reshape(-1, heads, 1)
    controller = ops.join_lanes(ops.join_lanes(time, time), time)
    _, timed = ops.inl_dynamics_step(still, still, x, controller, dt=0.0)
    # The strength of zeros is a half.
    out, table = ops.delta_rule(
        c * SHORT, b * SHORT, timed * (2 / LENGTH), dt, ops.zeros_like(dt), table, step,
        Decay(w.rate, w.shift), tiled=False,
    )  # fmt: skip
    out = out * (b.shape[-1] ** 0.5 / LENGTH) + x * w.skip.reshape(heads, 1)
    return out, table


def chunk_size(tokens: int, rows: int, most: int = 64) -> int:
    """Return the tokens of a row that a kernel of products computes at once.

    tokens, rows: of the step. One token where each row may have one only.
    """
    return 1 if tokens <= rows else min(most, tokens)
