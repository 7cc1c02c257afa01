"""Error bound for kernel results, derived from the op's body.

The reference is the op's body in float64 on inputs rounded to the storage dtype. The
error of rounding alone is measured: the same body in float32 arithmetic, with results
rounded to storage. A kernel's error may be ``spec.tolerance`` times (2) as large, plus
a few units in the last place, so that a body that happens to be exact still allows
rounding, and so that a kernel may add in another order than NumPy.

For a kernel that quantizes the inputs of products with packed weights
(``Kernel.activation_quant``), the rounding error is measured with a body that rounds
its inputs the same way. The reference stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inl.dtypes import EPSILON, rounded
from inl.spec.activation_quant import ACTIVATION_QUANTS
from inl.spec.op import CATALOG, Case, OpSpec
from inl.spec.tree import leaves, tree_map

FLOOR = {"float64": 8.0, "float32": 8.0, "bfloat16": 1.0, "float16": 1.0}
"""Minimum allowed error, in units in the last place of a row's largest result.

float32 and float64 accumulate in the dtype that they store, half types in a wider one.
"""

WIDE = ("float64", "float32")
"""Dtypes whose sums are as precise as their results. A sum of n terms that are added in
order has an error of about sqrt(n) units, blocked sums as in BLAS have less: both are
correct, so the floor is sqrt(n) if that is more."""


class BodyOps:
    """Ops computed by their bodies, with floating-point results rounded by ``store``.

    quantize: rounds the first operand of ``linear``.
    """

    def __init__(
        self,
        store: Callable[[OpSpec, Any], Any],
        quantize: Callable[[Any], Any] | None = None,
    ) -> None:
        self._store, self._quantize = store, quantize

    def __getattr__(self, name: str) -> Callable[..., Any]:
        spec = CATALOG[name]

        def run(*args: Any, **attrs: Any) -> Any:
            if spec.composite:
                return spec.body(self, *args, **attrs)
            if name == "linear" and self._quantize is not None:
                args = (self._quantize(args[0]), *args[1:])
            return self._store(spec, spec.body(*args, **attrs))

        return run


def stored(case: Case, dtype: str, precision: Any) -> tuple[Any, ...]:
    """Return a case's arguments, floats rounded to ``dtype`` in NumPy ``precision``."""

    def store(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if array.dtype.name != "float64":
            return array.copy()
        return rounded(array, dtype).astype(precision)

    return tuple(tree_map(store, argument) for argument in case.args)


def truth(spec: OpSpec, case: Case, dtype: str) -> Any:
    """Compute the body in float64: the reference result."""
    ops = BodyOps(lambda _spec, result: result)
    return getattr(ops, spec.name)(*stored(case, dtype, np.float64), **case.attrs)


def storage_run(spec: OpSpec, case: Case, dtype: str, inputs: str = "") -> Any:
    """Compute the body in float32 arithmetic with results rounded to ``dtype``.

    Computes in float64 if ``dtype`` is float64. inputs: a name in
    :data:`inl.spec.activation_quant.ACTIVATION_QUANTS`, to round inputs of products.
    """
    quantize = ACTIVATION_QUANTS[inputs] if inputs else None
    wide = np.float64 if dtype == "float64" else np.float32
    args = stored(case, dtype, wide)
    if spec.dtypes and dtype not in spec.dtypes:
        # The body's own results are out of range: those of the op are rounded.
        unrounded = BodyOps(lambda _op, result: result, quantize)
        result = getattr(unrounded, spec.name)(*args, **case.attrs)
        return round_results(spec, result, dtype)
    ops = BodyOps(lambda op, result: round_results(op, result, dtype), quantize)
    return getattr(ops, spec.name)(*args, **case.attrs)


def round_results(
    spec: OpSpec, result: Any, dtype: str, args: tuple[Any, ...] = ()
) -> Any:
    """Round floats to ``dtype``, or to float32 if not ``spec.rounds``.

    args: of the op; an array of them that the result contains is not rounded.
    """
    unchanged = {id(leaf) for leaf in leaves(args)}
    precision = np.float64 if dtype == "float64" else np.float32
    grid = dtype if spec.rounds else precision.__name__

    def store(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if array.dtype.kind != "f" or id(leaf) in unchanged:
            return array
        return rounded(array.astype(precision, copy=False), grid)

    return tree_map(store, result)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Largest error of a result over its rows, and the bound on it."""

    error: float
    bound: float
    where: str = ""
    """Position, value and expected value of the largest error."""
    problem: str = ""
    """What is wrong, where an error has no size: NaN, or a wrong shape."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; false for NaN."""
        return self.error <= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.passed else ">"
        size = f"error {self.error:.3g} {sign} {self.bound:.3g}"
        return f"{self.problem or size} {self.where}".rstrip()


def judge(
    spec: OpSpec, case: Case, dtype: str, result: Any, inputs: str = ""
) -> Verdict:
    """Compare a kernel's result (NumPy leaves) with the reference, row by row.

    inputs: the kernel's ``activation_quant`` if its weights are packed, else empty.
    """
    exact = truth(spec, case, dtype)
    expected = list(leaves(exact))
    rounded_run = list(leaves(storage_run(spec, case, dtype, inputs)))
    results = list(leaves(result))
    if len(results) != len(expected):
        problem = f"{len(results)} results, expected {len(expected)}"
        return Verdict(np.inf, 0.0, problem=problem)
    worst = Verdict(0.0, 0.0)
    grid = dtype if spec.rounds or dtype == "float64" else "float32"
    terms = _terms(spec, case, exact)
    triples = zip(results, expected, rounded_run, strict=True)
    for index, triple in enumerate(triples):
        verdict = judge_result(*triple, grid, tolerance=spec.tolerance, terms=terms)
        if not verdict.passed:
            part = f"in result {index} " if len(results) > 1 else ""
            return replace(verdict, where=f"{part}{verdict.where}")
        if verdict.error > worst.error:
            worst = verdict
    return worst


def judge_result(
    result: Any, exact: Any, close: Any, dtype: str, *, tolerance: float, terms: float
) -> Verdict:
    """Compare one array with ``exact``, computed in float64, row by row.

    close: the same computation in float32, rounded to ``dtype``. tolerance: of the op.
    terms: products that are summed for a value.
    """
    floor = FLOOR[dtype]
    if dtype in WIDE:
        floor = max(floor, terms**0.5)
    return _judge_leaf(result, exact, close, tolerance, floor * EPSILON[dtype])


def _terms(spec: OpSpec, case: Case, result: Any) -> float:
    """Return the mean number of products that are summed for a value of the result."""
    flops = spec.cost(result, *case.args, **case.attrs).flops
    # The last item is the updated state of an op that consumes it: it is copied.
    computed = result[:-1] if spec.consumes and type(result) is tuple else result
    return flops / 2 / max(sum(np.size(leaf) for leaf in leaves(computed)), 1)


def _judge_leaf(
    got: Any, exact: Any, close: Any, factor: float, floor: float
) -> Verdict:
    got, exact = np.asarray(got), np.asarray(exact)
    if got.shape != exact.shape:
        problem = f"shape {got.shape}, expected {exact.shape}"
        return Verdict(np.inf, 0.0, problem=problem)
    if exact.size == 0:
        return Verdict(0.0, 0.0)
    if exact.dtype.kind != "f":
        return _judge_exact(got, exact)
    width = exact.shape[-1] if exact.ndim else 1
    if width == 1:  # a row of one number has no other to be compared in size with
        width = exact.size
    rows = [np.asarray(a, np.float64).reshape(-1, width) for a in (got, exact, close)]
    size = np.abs(np.where(np.isfinite(rows[1]), rows[1], 0)).max(-1)
    errors, noise = (_distance(a, rows[1]) for a in (rows[0], rows[2]))
    # The rounding error of a single row varies by chance: use the largest of all rows.
    share = np.max(noise.max(-1) / np.where(size > 0, size, 1))
    allowed = (factor * share + floor) * size
    row = int(np.argmax(errors.max(-1) - allowed))
    column = int(np.argmax(errors[row]))
    at = np.unravel_index(row * width + column, exact.shape)
    where = f"at {_shown(at)}: found {got[at]:.6g}, expected {exact[at]:.6g}"
    return Verdict(
        float(errors[row, column]), float(allowed[row]), where, _not_finite(got, exact)
    )


def _distance(got: Any, exact: Any) -> Any:
    """Return the absolute error of each value, infinite for NaN; equal ones have 0."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got - exact)
    same = (got == exact) | (np.isnan(got) & np.isnan(exact))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


def _not_finite(got: Any, exact: Any) -> str:
    """Return how many values are NaN or infinite but should not be; empty for none."""
    for name, test in (("NaN", np.isnan), ("infinite", np.isinf)):
        count = int(np.sum(test(got) & np.isfinite(exact)))
        if count:
            return (
                f"{count} of {exact.size} values {'is' if count == 1 else 'are'} {name}"
            )
    return ""


def _judge_exact(got: Any, exact: Any) -> Verdict:
    """Compare integers: the error is the number of different values."""
    differs = np.argwhere(got != exact)
    if not len(differs):
        return Verdict(0.0, 0.0)
    at = tuple(differs[0])
    where = f"at {_shown(at)}: found {got[at]}, expected {exact[at]}"
    problem = f"{len(differs)} of {exact.size} values differ"
    return Verdict(float(len(differs)), 0.0, where, problem)


def _shown(index: Any) -> str:
    return str([int(i) for i in index])
