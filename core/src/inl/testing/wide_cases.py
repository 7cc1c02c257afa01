"""Cases of elementwise ops and copies with the widths of real models.

Their own cases are narrow; a kernel may be right for these and compute one block of
columns, heads or rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.ops.attention import random_step
from inl.ops.norm import LayerNorm, Norm
from inl.spec.op import Case
from inl.spec.tree import tree_map

if TYPE_CHECKING:
    from inl.spec.op import OpSpec

Rng = np.random.Generator

COLUMNS: Final = 5123
"""Hidden sizes are up to 18,432; no multiple of a block."""
WIDENED: Final = frozenset({
    "activate", "clip", "combine_experts", "join_lanes", "read_slots", "reduce_norm",
    "sigmoid_gate", "silu", "soft_cap", "unit_rows", "write_slots",
})  # fmt: skip
"""Ops whose last axis, and that of each parameter, may have any size."""
ROWS: Final = 33_000
"""Above 32,767, the largest number of 16 bits with a sign."""
HEADS: Final = (2, 40, 128)


def wide_cases(op: OpSpec, cases: Sequence[Case], rng: Rng) -> Iterator[Case]:
    """Yield cases of ``op`` that are wider than ``cases``."""
    if op.name in WIDENED:
        first: dict[str, Case] = {}
        for case in cases:
            first.setdefault(str(sorted(case.attrs.items())), case)
        for case in first.values():
            yield _widened(case, rng)
    if op.name in OTHERS:
        yield from OTHERS[op.name](rng)


def _widened(case: Case, rng: Rng) -> Case:
    """Return a case whose columns are drawn from those of ``case``."""
    sizes = {x.shape[-1] for x in case.args if _is_wide(x)}
    chosen = {size: rng.integers(0, size, COLUMNS) for size in sorted(sizes)}

    def widened(x: Any) -> Any:
        is_float = isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.ndim
        return x[..., chosen[x.shape[-1]]] if is_float and x.shape[-1] in chosen else x

    args = tuple(tree_map(widened, arg) for arg in case.args)
    return replace(case, name=f"{case.name}/{COLUMNS} columns", args=args)


def _is_wide(x: Any) -> bool:
    """Whether an argument has columns: a gate has one, and weights of experts few."""
    is_float = isinstance(x, np.ndarray) and x.dtype == np.float64
    return is_float and x.ndim > 1 and x.shape[-1] > 1


def _take_rows(rng: Rng) -> Iterator[Case]:
    index = np.array([ROWS - 1, 0, 32_768, 300, ROWS - 1], np.int32)
    yield Case(f"{ROWS} rows", (rng.standard_normal((ROWS, 3)), index))
    index = np.array([3, 1], np.int32)
    yield Case(f"{COLUMNS} columns", (rng.standard_normal((4, COLUMNS)), index))


def _layer_norm(rng: Rng) -> Iterator[Case]:
    """Yield rows of drawn numbers; many of two numbers have sums of more rounding."""
    x = 3 * rng.standard_normal((2, COLUMNS)) + 1
    w = LayerNorm(*rng.standard_normal((2, COLUMNS)))
    yield Case(f"{COLUMNS} columns", (x, w), {"eps": 1e-5})


def _rms_norm(rng: Rng) -> Iterator[Case]:
    """Yield queries and keys of a layer, each head of which is normalized."""
    x, weight = rng.standard_normal(HEADS), rng.standard_normal(HEADS[-1])
    yield Case("2x40x128", (x, Norm(weight)), {"eps": 1e-6})


def _temper_queries(rng: Rng) -> Iterator[Case]:
    positions = np.array([9000, 100_000], np.int32)
    attrs = {"floor": 8192, "gain": 0.1}
    yield Case("2x40x128", (rng.standard_normal(HEADS), positions), attrs)


def _chunk_rows(rng: Rng) -> Iterator[Case]:
    """Yield a context of two chunks of Llama 4."""
    step, _ = random_step(rng, [8200, 8190, 3], [1, 3, 2])
    yield Case("chunks of 8192", (step,), {"chunk": 8192, "block_size": 4})


OTHERS: Final[Mapping[str, Callable[[Rng], Iterator[Case]]]] = {
    "chunk_rows": _chunk_rows,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "take_rows": _take_rows,
    "temper_queries": _temper_queries,
}
"""Ops whose arguments have other axes that matter."""
