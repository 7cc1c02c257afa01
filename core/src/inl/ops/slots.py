"""State of fixed size per sequence: read by the tokens that continue an answer.

Decoding rows feed one token of an answer each; all other tokens belong to prompts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from inl.ops.attention import random_step
from inl.spec.op import Case, Spec, op
from inl.spec.step import Array, Step


def _steps(rng: np.random.Generator) -> Iterable[tuple[str, Step]]:
    yield "decode", random_step(rng, [5, 2, 9], [1, 1, 1])[0]
    mixed, _ = random_step(rng, [3, 8, 0, 4], [1, 1, 7, 3], pad_rows=2, pad_tokens=3)
    order = rng.permutation(np.arange(1, 5)).astype(np.int32)
    slots = np.concatenate([order, np.zeros(2, np.int32)])
    yield "mixed", mixed._replace(slots=slots)


def _read_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, step in _steps(rng):
        yield Case(name, (rng.standard_normal((6, 5)), step))


@op(
    shapes=lambda table, step: Spec(
        (*step.tokens.shape, *table.shape[1:]), table.dtype
    ),
    cases=_read_cases,
)
def read_slots(table: Array, step: Step) -> Array:
    """What the slot of each token's row holds in ``table`` [slots, ...]: [T, ...].

    Only for tokens of decoding rows; those of prompts, and padding, get zeros.
    """
    continues = step.rows < step.used_counts[0]
    continues &= np.arange(step.tokens.shape[0]) < step.used_counts[2]
    continues = continues.reshape(-1, *(1,) * (table.ndim - 1))
    return np.where(continues, table[step.slots[step.rows]], 0).astype(table.dtype)


def _write_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, step in _steps(rng):
        x = rng.standard_normal((step.tokens.shape[0], 5))
        yield Case(name, (x, rng.standard_normal((6, 5)), step))


@op(
    shapes=lambda x, table, step: table,  # noqa: ARG005
    cases=_write_cases,
    consumes=("table",),
)
def write_slots(x: Array, table: Array, step: Step) -> Array:
    """Put ``x`` [T, ...] of each row's last token into the row's slot of ``table``.

    Padding rows put zeros into slot 0, which is nobody's.
    """
    fresh = table.copy()
    used = np.arange(step.slots.shape[0]) < step.used_counts[1]
    used = used.reshape(-1, *(1,) * (table.ndim - 1))
    last = np.clip(step.starts[1:] - 1, 0, x.shape[0] - 1)
    fresh[step.slots] = np.where(used, x[last], 0)
    return fresh
