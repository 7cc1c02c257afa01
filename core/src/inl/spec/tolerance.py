"""When a kernel's result counts as right.

The truth is the op's body in float64 on inputs already rounded to the storage dtype.
What rounding alone costs is measured, not guessed: the same body in float32
arithmetic, its results rounded to storage. A kernel may err ``spec.tolerance`` times
(2) as much, plus a floor of a few units in the last place, so that a body that happens
to be exact does not forbid a rounding.

A kernel that declares a coarser rounding of what packed weights multiply
(``Kernel.inputs``) is judged beside the body whose products round their input so: the
truth stays the same, what rounding alone costs is then more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from inl.dtypes import EPSILON, rounded
from inl.spec.activation_quant import ACTIVATION_QUANTS
from inl.spec.op import CATALOG, Case, OpSpec
from inl.spec.tree import leaves, tree_map

FLOOR = {"float64": 8.0, "float32": 8.0, "bfloat16": 1.0, "float16": 1.0}
"""Units in the last place, of a row's largest result, that every result may be off.

Wide types accumulate as narrowly as they store, half types do not.
"""


class BodyOps:
    """Ops that are their bodies, with floating results rounded by ``store``.

    ``held``: how products hold their first operand.
    """

    def __init__(
        self,
        store: Callable[[OpSpec, Any], Any],
        held: Callable[[Any], Any] | None = None,
    ) -> None:
        self._store, self._held = store, held

    def __getattr__(self, name: str) -> Callable[..., Any]:
        spec = CATALOG[name]

        def run(*args: Any, **attrs: Any) -> Any:
            if spec.composite:
                return spec.body(self, *args, **attrs)
            if name == "linear" and self._held is not None:
                args = (self._held(args[0]), *args[1:])
            return self._store(spec, spec.body(*args, **attrs))

        return run


def stored(case: Case, dtype: str, precision: Any) -> tuple[Any, ...]:
    """Arguments of a case, floats rounded to ``dtype`` and held as ``precision``."""

    def store(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if array.dtype.name != "float64":
            return array.copy()
        return rounded(array, dtype).astype(precision)

    return tuple(tree_map(store, argument) for argument in case.args)


def truth(spec: OpSpec, case: Case, dtype: str) -> Any:
    """The body in float64."""
    ops = BodyOps(lambda _spec, result: result)
    return getattr(ops, spec.name)(*stored(case, dtype, np.float64), **case.attrs)


def storage_run(spec: OpSpec, case: Case, dtype: str, inputs: str = "") -> Any:
    """The body in float32 arithmetic (float64 for that) with ``dtype`` results.

    inputs: a name in :data:`inl.spec.activation_quant.INPUTS`, for what products multiply.
    """
    held = ACTIVATION_QUANTS[inputs] if inputs else None
    ops = BodyOps(lambda op, result: round_results(op, result, dtype), held)
    wide = np.float64 if dtype == "float64" else np.float32
    return getattr(ops, spec.name)(*stored(case, dtype, wide), **case.attrs)


def round_results(spec: OpSpec, result: Any, dtype: str) -> Any:
    """Round floating results to storage, or to float32 for an op that keeps that."""
    held = np.float64 if dtype == "float64" else np.float32
    grid = dtype if spec.rounds else held.__name__

    def store(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if array.dtype.kind != "f":
            return array
        return rounded(array.astype(held, copy=False), grid)

    return tree_map(store, result)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far the worst row of a result is from the truth, and how far it may be."""

    error: float
    bound: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.error <= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.passed else ">"
        return f"error {self.error:.3g} {sign} {self.bound:.3g} {self.where}".rstrip()


def judge(
    spec: OpSpec, case: Case, dtype: str, result: Any, inputs: str = ""
) -> Verdict:
    """Compare a kernel's result (NumPy leaves) with the truth, row by row.

    inputs: what the kernel declares, where its weights are packed.
    """
    want = list(leaves(truth(spec, case, dtype)))
    near = list(leaves(storage_run(spec, case, dtype, inputs)))
    found = list(leaves(result))
    if len(found) != len(want):
        return Verdict(np.inf, 0.0, f"{len(found)} results, expected {len(want)}")
    worst = Verdict(0.0, 0.0)
    grid = dtype if spec.rounds or dtype == "float64" else "float32"
    for index, (got, exact, close) in enumerate(zip(found, want, near, strict=True)):
        verdict = _judge_leaf(got, exact, close, spec.tolerance, grid)
        if not verdict.passed:
            return Verdict(verdict.error, verdict.bound, f"result {index}")
        if verdict.error > worst.error:
            worst = verdict
    return worst


def _judge_leaf(got: Any, exact: Any, close: Any, factor: float, dtype: str) -> Verdict:
    got, exact = np.asarray(got), np.asarray(exact)
    if got.shape != exact.shape:
        return Verdict(np.inf, 0.0, f"shape {got.shape}, expected {exact.shape}")
    if exact.size == 0:
        return Verdict(0.0, 0.0)
    if exact.dtype.kind != "f":
        return Verdict(float(np.sum(got != exact)), 0.0)
    width = exact.shape[-1] if exact.ndim else 1
    got, exact, close = (
        np.asarray(a, np.float64).reshape(-1, width) for a in (got, exact, close)
    )
    size = np.abs(exact).max(-1)
    errors = np.abs(got - exact).max(-1)
    errors = np.where(np.isnan(errors), np.inf, errors)
    # One row's rounding is a lucky draw: the largest of all rows stands for each.
    noise = np.max(np.abs(close - exact).max(-1) / np.where(size > 0, size, 1))
    allowed = (factor * noise + FLOOR[dtype] * EPSILON[dtype]) * size
    row = int(np.argmax(errors - allowed))
    return Verdict(float(errors[row]), float(allowed[row]))
