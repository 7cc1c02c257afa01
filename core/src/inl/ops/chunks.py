"""Attention in chunks of a text, and queries that grow with positions: Llama 4."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from inl.errors import RequestError
from inl.ops.attention import SHAPES, random_step
from inl.spec.op import Case, Spec, elements, op
from inl.spec.step import Array, Step


def check_chunk(chunk: int, block_size: int) -> None:
    """Raise :class:`RequestError` unless a chunk is a whole number of cache blocks."""
    if chunk < 1 or chunk % block_size:
        raise RequestError(
            f"chunk_rows: chunk: found {chunk} tokens, accepted: a multiple of "
            f"{block_size}, the tokens of a cache block"
        )


def _row_shapes(step: Any, *, chunk: int, block_size: int) -> Step:
    check_chunk(chunk, block_size)
    groups, _, width = step.blocks.shape
    count, columns = step.tokens.shape[0], min(width, chunk // block_size)
    one = Spec((count,), "int32")
    rows: Step = step._replace(
        positions=one, rows=one, starts=Spec((count + 1,), "int32"), lengths=one,
        slots=one, blocks=Spec((groups, count, columns), "int32"),
        adapters=one, used_counts=Spec((3,), "int32"), plan=(),
    )  # fmt: skip
    return rows


def _row_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, cached, counts, pads in SHAPES:
        step, _ = random_step(rng, cached, counts, **pads)
        for chunk in (4, 8, 400):
            yield Case(f"{name}/{chunk}", (step,), {"chunk": chunk, "block_size": 4})


@op(shapes=_row_shapes, cases=_row_cases, rounds=False, since=(1, 2))
def chunk_rows(step: Step, *, chunk: int, block_size: int) -> Step:
    """Return a step for attention whose rows are tokens that see their chunk only.

    Row t is token t at its position in its chunk of ``chunk`` tokens; its blocks are
    those of the chunk, up to ``chunk / block_size``. Keys must be in the cache already.
    ``writes``, ``samples`` and ``uniforms`` are those of ``step``. Padding tokens have
    rows of length 0. Raises :class:`~inl.errors.RequestError` for a chunk that is not
    a whole number of blocks.
    """
    check_chunk(chunk, block_size)
    count, width = step.tokens.shape[0], step.blocks.shape[2]
    index, used = np.arange(count + 1, dtype=np.int32), step.used_counts[2]
    columns = np.arange(min(width, chunk // block_size))
    first = step.positions // chunk * (chunk // block_size)
    entries = np.minimum(first[:, None] + columns, width - 1)
    places = step.positions % chunk
    return step._replace(
        positions=places,
        rows=index[:-1],
        starts=np.minimum(index, used),
        lengths=np.where(index[:-1] < used, places + 1, 0),
        slots=step.slots[step.rows],
        blocks=step.blocks[:, step.rows[:, None], entries],
        adapters=step.adapters[step.rows],
        used_counts=np.full(3, used, np.int32),
        plan=(),
    )


def _temper_cases(rng: np.random.Generator) -> Iterable[Case]:
    q, positions = rng.standard_normal((6, 3, 8)), np.array([0, 6, 7, 8, 40, 8191])
    for floor, gain in ((8, 0.1), (8192, 0.1), (1, 2.0)):
        attrs = {"floor": floor, "gain": gain}
        yield Case(f"{floor}/{gain}", (q, positions.astype(np.int32)), attrs)


@op(
    shapes=lambda q, _positions, **_: Spec(q.shape, q.dtype),
    cases=_temper_cases,
    flops=lambda q, _positions, **_: elements(q),
    since=(1, 2),
)
def temper_queries(q: Array, positions: Array, *, floor: int, gain: float) -> Array:
    """Scale queries [T, heads, d] by ``1 + gain * log(1 + floor((p + 1) / floor))``.

    p: int32 positions [T]. Sharpens attention over long texts (Nakanishi, 2025). The
    factor is computed in float32 or wider.
    """
    factor = 1 + gain * np.log1p((positions + 1) // floor).astype(q.dtype)
    return q * factor[:, None, None]
