"""Larger cases of each op: many rows and long contexts.

They are no part of ``OpSpec.cases``, which tests of slow simulators run too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import rounded
from inl.ops.attention import FULL_SHAPES, LARGE_SHAPES, attention_case, random_step
from inl.ops.fused import attend_case
from inl.ops.sample import is_decided
from inl.ops.sample_cases import MARGIN
from inl.ops.step import empty_tables
from inl.spec.cache import Cache
from inl.spec.message import Row, step_frame
from inl.spec.op import Case
from inl.spec.step import NEUTRAL, Bucket
from inl.spec.tree import leaves
from inl.testing.long_sums import LONG_SUMS, TERMS

if TYPE_CHECKING:
    from inl.spec.op import OpSpec

Rng = np.random.Generator
Make = Callable[[Rng, int], Case]

ROWS = (130,)
"""Numbers of rows: beyond the tiles of 16, 32, 64 and 128 rows that kernels use."""
BATCHES = (4, 8, 16, 32, 64, 256)
"""Further numbers of rows of products, whose kernels differ by them: one that is right
for other numbers may be wrong for a full tile."""
MANY_ROWS = 1100
"""Rows of the tokens of a long prompt: beyond a block of 1,024 threads."""
MANY_SLOTS = 300
"""Rows of steps, or of what they sample: beyond 8 bits."""
FULL_ROWS = (65, 130, 257, 1030)
"""Numbers of rows of a full check."""


def larger_cases(
    op: OpSpec,
    cases: Sequence[Case],
    rng: Rng,
    *,
    full: bool,
    half: bool,
    many: bool,
) -> Iterator[Case]:
    """Yield cases of ``op`` with more rows and longer contexts than ``cases``.

    half: for a dtype that is narrower than float32, whose sums need a wider one; adds
    long sums. full: more sizes, and for ops of independent arguments every case
    enlarged instead of the one with the most rows. many: adds many rows, for an op that
    a kernel computes; a composite has those of the ops that it calls.
    """
    counts = FULL_ROWS if full else ROWS
    if half and op.name in LONG_SUMS:
        yield Case(f"sum of {TERMS}", *LONG_SUMS[op.name](rng))
    if op.name in CONTEXTS:
        for name, *_ in (*LARGE_SHAPES, *(FULL_SHAPES if full else ())):
            yield CONTEXTS[op.name](rng, name)
    elif op.name in BY_ROWS:
        for rows in (*counts, *((MANY_SLOTS,) if many else ())):
            yield BY_ROWS[op.name](rng, rows)
    else:
        tall = [case for case in cases if _row_count(op, case) > 1]
        if op.name in PRODUCTS:
            counts = (*counts, *BATCHES)
        counts = (*counts, *((MANY_ROWS,) if many else ()))
        largest = max(tall, key=partial(_extent, op), default=None)
        for rows in counts:
            for case in tall:
                if case is largest or (full and rows == counts[0]):
                    yield _with_rows(op, case, rows, rng)


PRODUCTS = (
    "linear", "qkv_linear", "gated_mlp", "head_linear", "experts", "norm_qkv",
    "norm_mlp", "lora",
)  # fmt: skip
"""Ops whose kernels multiply tiles of rows."""


def _row_count(op: OpSpec, case: Case) -> int:
    """Return the size of the first axis; 0 if further arguments depend on it."""
    first = case.args[0]
    dependent = {"cache", "step", "tables", "starts"} & set(op.parameters)
    if dependent or not isinstance(first, np.ndarray) or not first.ndim:
        return 0
    return len(first) if first.ndim > 1 or _is_index(first) else 0


def _extent(op: OpSpec, case: Case) -> tuple[int, int]:
    """Return the number of rows of a case, and that of its arrays."""
    return _row_count(op, case), sum(1 for _ in leaves(case.args))


def _with_rows(op: OpSpec, case: Case, rows: int, rng: Rng) -> Case:
    """Return a case of ``rows`` rows, drawn from the rows of ``case``."""
    count = _row_count(op, case)
    chosen = rng.integers(0, count, rows)

    def enlarged(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or not x.ndim:
            return x
        if len(x) == count and (x.ndim > 1 or _is_index(x)):
            return x[chosen]
        return rng.choice(x, rows) if x.ndim == 1 and _is_index(x) else x

    return Case(f"{case.name}/{rows} rows", tuple(map(enlarged, case.args)), case.attrs)


def _is_index(x: Any) -> bool:
    return bool(np.asarray(x).dtype.kind == "i")


def _attention(rng: Rng, name: str) -> Case:
    return attention_case(rng, name, (6, 2, 64), {})


def _attend(rng: Rng, name: str) -> Case:
    case = attention_case(rng, name, (6, 2, 16), {})
    q, cache, step = case.args
    k, v = rng.standard_normal((2, q.shape[0], 2, 16))
    return Case(case.name, (q, k, v, cache, step), case.attrs)


def _attend_project(rng: Rng, name: str) -> Case:
    return attend_case(rng, name, (6, 2, 16), {})


CONTEXTS: dict[str, Callable[[Rng, str], Case]] = {
    "attention": _attention,
    "attend": _attend,
    "attend_project": _attend_project,
}
"""Ops that read the cache, by shape name."""


def _write_kv(rng: Rng, tokens: int) -> Case:
    k, v = rng.standard_normal((2, tokens, 3, 64))
    blocks = 2 + -(-tokens // 4)
    cache = Cache(*rng.standard_normal((2, blocks, 4, 3, 64)))
    cells = rng.permutation(np.arange(4, 4 * blocks))[:tokens].astype(np.int32)
    return Case(f"{tokens} rows", (k, v, cache, cells))


def _read_slots(rng: Rng, rows: int) -> Case:
    step, _ = random_step(rng, [3] * rows, [1] * rows)
    return Case(f"{rows} rows", (rng.standard_normal((rows + 1, 5)), step))


def _write_slots(rng: Rng, rows: int) -> Case:
    table, step = _read_slots(rng, rows).args
    x = rng.standard_normal((step.tokens.shape[0], 5))
    return Case(f"{rows} rows", (x, table, step))


def _make_step(rng: Rng, rows: int) -> Case:
    size, width = 4, 6
    tables = empty_tables(groups=1, slots=rows + 1, max_blocks_per_seq=width, vocab=3)
    tables.blocks[:, 1:] = rng.integers(1, 30, (1, rows, width))
    tables.lengths[1:] = rng.integers(0, 20, rows)
    tables.last[1:] = rng.integers(0, 90, rows)
    slots = rng.permutation(np.arange(1, rows + 1))
    mixed = [Row(int(slot), [-1], [0.25]) for slot in slots[:-1]]
    mixed.append(Row(int(slots[-1]), [int(x) for x in rng.integers(0, 90, 3)]))
    bucket = Bucket(tokens=rows + 4, rows=rows + 1)
    message = step_frame(
        bucket, mixed, step=3, groups=1, block_size=size, decode_rows=rows - 1
    )
    attrs = {"bucket": bucket, "block_size": size}
    return Case(f"{rows} rows", (message, tables), attrs)


def _sample(rng: Rng, rows: int) -> Case:
    """Return rows of which half are greedy; their tokens do not change by rounding."""
    step, _ = random_step(rng, [3] * rows, [1] * rows)
    tables = empty_tables(groups=1, slots=rows + 1, max_blocks_per_seq=4, vocab=33)
    tables.params[1:] = NEUTRAL
    tables.params[1:, 0] = rng.permutation(np.arange(rows) % 2)
    while True:
        logits = 3 * rng.standard_normal((rows, 33))
        uniforms = rng.uniform(0.01, 0.99, rows).astype(np.float32).view(np.int32)
        step = step._replace(uniforms=uniforms)
        stored = [rounded(logits, x) for x in ("float32", "bfloat16", "float16")]
        if is_decided(stored, step, tables, MARGIN / 8, full=False):
            break
    return Case(f"sample/{rows} rows", (logits, step, tables), {"sampler": "sample"})


BY_ROWS: dict[str, Make] = {
    "write_kv": _write_kv,
    "read_slots": _read_slots,
    "write_slots": _write_slots,
    "make_step": _make_step,
    "sample": _sample,
}
"""Ops whose arguments depend on each other, by the number of rows."""
