"""Per-slot state of fixed size, read by generated tokens.

Decoding rows have one generated token each; all other tokens belong to prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from inl.ops.attention import random_step
from inl.spec.op import Case, Spec, nbytes, op
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
    traffic=lambda out, _table, step: nbytes((out, out, step.rows, step.slots)),
)
def read_slots(table: Array, step: Step) -> Array:
    """Read each decoding token's slot of ``table`` [slots, ...]: [T, ...].

    Tokens of prompts and padding tokens get zeros.
    """
    continues = step.rows < step.used_counts[0]
    continues &= np.arange(step.tokens.shape[0]) < step.used_counts[2]
    continues = continues.reshape(-1, *(1,) * (table.ndim - 1))
    return np.where(continues, table[step.slots[step.rows]], 0).astype(table.dtype)


def _write_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, step in _steps(rng):
        x = rng.standard_normal((step.tokens.shape[0], 5))
        yield Case(name, (x, rng.standard_normal((6, 5)), step))


def _write_traffic(table: Any, _x: Any, _table: Any, step: Any) -> int:
    """One entry per row, read and written."""
    entry = nbytes(table) // table.shape[0]
    return int(nbytes(step.slots) + 2 * step.slots.shape[0] * entry)


@op(
    shapes=lambda x, table, step: table,  # noqa: ARG005
    cases=_write_cases,
    consumes=("table",),
    traffic=_write_traffic,
)
def write_slots(x: Array, table: Array, step: Step) -> Array:
    """Write each row's last token of ``x`` [T, ...] to its slot of ``table``.

    Padding rows write zeros to slot 0. Returns the table [slots, ...].
    """
    updated = table.copy()
    used = np.arange(step.slots.shape[0]) < step.used_counts[1]
    used = used.reshape(-1, *(1,) * (table.ndim - 1))
    last = np.clip(step.starts[1:] - 1, 0, x.shape[0] - 1)
    updated[step.slots] = np.where(used, x[last], 0)
    return updated
