"""Promises of kernels: every op, each of its cases, each dtype of the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.spec.cache import Cache
from inl.spec.op import Case, OpSpec, Spec
from inl.spec.step import Step
from inl.spec.strict_array import StrictArray
from inl.spec.tolerance import Verdict, judge, truth
from inl.spec.tree import tree_map
from inl.testing.check import Check, CheckFailed, Measure, require, worst
from inl.testing.kernel_site import Site, passed, returned_state
from inl.testing.packed_checks import packed_checks

if TYPE_CHECKING:
    from inl.spec.kernel import Kernel
    from inl.testing.target import Target

HUGE = {"float16": 1e3}
"""What lies in cells that nobody owns; finite, and its products are too."""


def kernel_checks(target: Target) -> Iterator[Check]:
    """Cases, poisoned cases, state used again, and refusals, op by op."""
    kernels = target.selection.kernels
    for op in list(target.ops.values()):
        names = [case.name for case in _cases(target, op, 0)]
        for dtype in target.dtypes:
            yield from _op_checks(target, op, names, dtype)
            yield from packed_checks(target, op, dtype)
        for kernel in kernels:
            if kernel.op == op.name:
                run = partial(_refusals, target, op, kernel)
                yield Check("kernel", f"{op.name}/refusals/{kernel.name}", run)


def _op_checks(
    target: Target, op: OpSpec, names: list[str], dtype: str
) -> Iterator[Check]:
    def check(name: str, run: Callable[..., Any], *args: Any) -> Check:
        bound = partial(run, target, op, *args, dtype)
        return Check("kernel", f"{op.name}/{name}/{dtype}", bound)

    for place, name in enumerate(names):
        yield check(name, _case, place)
    if "cache" in op.parameters and "step" in op.parameters:
        for place, name in enumerate(names):
            yield check(f"poison/{name}", _poisoned, place)
    if op.consumes and names:
        yield check("twice", _twice)


def _cases(target: Target, op: OpSpec, turn: int) -> list[Case]:
    return list(op.cases(target.rng(op.name, turn)))


def _case(target: Target, op: OpSpec, place: int, dtype: str) -> Measure:
    def verdict(turn: int) -> tuple[Verdict, Site]:
        site = Site(target, op, _cases(target, op, turn)[place], dtype)
        return judge(op, site.case, dtype, site.run()), site

    measures = []
    for turn in range(target.rounds):
        found, site = verdict(turn)
        if not found.passed and site.case.attrs.get("sampler", "greedy") != "greedy":
            # A uniform number may fall on the border of two tokens: draw once more.
            found, site = verdict(turn + 1000)
        measures.append(passed(found, site, target.seed))
    return worst(measures)


def _poisoned(target: Target, op: OpSpec, place: int, dtype: str) -> Measure:
    case = poison(op, _cases(target, op, 0)[place], HUGE.get(dtype, 1e30))
    site = Site(target, op, case, dtype)
    result = site.run()
    found = judge(op, case, dtype, result)
    return passed(
        found, site, target.seed, "; cells that nobody owns hold huge numbers"
    )


def _twice(target: Target, op: OpSpec, dtype: str) -> Measure:
    case = _cases(target, op, 0)[0]
    first = returned_state(truth(op, case, dtype))
    place = op.parameters.index(op.consumes[0])
    args = (*case.args[:place], first, *case.args[place + 1 :])
    site = Site(target, op, case, dtype)
    found = judge(op, replace(case, args=args), dtype, site.run_twice())
    note = f"; on the {op.consumes[0]} that the first call gave back"
    return passed(found, site, target.seed, note)


def poison(op: OpSpec, case: Case, huge: float) -> Case:
    """Fill every cell that no row reads, and the keys and values of padding."""
    args = dict(zip(op.parameters, case.args, strict=True))
    step: Step = args["step"]
    cache: Cache = args["cache"]
    blocks, size = cache.k.shape[:2]
    unowned = np.ones((blocks, size), bool)
    for row, length in enumerate(step.lengths):
        for place in range(int(length)):
            block = step.blocks[case.attrs.get("group", 0), row, place // size]
            unowned[block, place % size] = False
    args["cache"] = Cache(*(np.where(unowned[..., None, None], huge, x) for x in cache))
    padding = slice(int(step.used_counts[2]), None)
    for name in ("k", "v"):
        if name in args:
            args[name] = args[name].copy()
            args[name][padding] = huge
    for name in ("cos", "sin"):
        if name in args:  # all padding writes one cell, in any order: the same to it
            args[name] = args[name].copy()
            args[name][padding] = args[name][padding][:1]
    return replace(case, args=tuple(args.values()))


def _refusals(target: Target, op: OpSpec, kernel: Kernel) -> None:
    """Ask about specs that no model has: each answer is ``None`` or a sentence."""
    for case in _cases(target, op, 0)[:1]:
        site = Site(target, op, case, target.dtypes[0])
        for what, change in NONSENSE.items():
            specs = tuple(tree_map(change, spec) for spec in site.specs)
            found = _ask(kernel, what, partial(kernel.refuse, *specs, **case.attrs))
            _sentence(kernel, what, found)
    if op.weights is not None:
        fields = getattr(op.weights, "_fields", ())
        for dtype in ("float32", "no_such_dtype"):
            for shape in ((), (0,), (3,), (7, 5), (2, 3, 4)):
                what = f"packing {dtype} of shape {shape}"
                specs_by_name = {name: Spec(shape, dtype) for name in fields}
                ask = partial(kernel.can_pack, **specs_by_name)
                _sentence(kernel, what, _ask(kernel, what, ask))


NONSENSE: dict[str, Callable[[StrictArray], StrictArray]] = {
    "empty tensors": lambda x: StrictArray((0,) * len(x.shape), x.dtype),
    "huge tensors": lambda x: StrictArray((1 << 40,) * len(x.shape), x.dtype),
    "an unknown dtype": lambda x: StrictArray(x.shape, "float8_of_nobody"),
    "odd sizes": lambda x: StrictArray(tuple(2 * n + 1 for n in x.shape), x.dtype),
}


def _ask(kernel: Kernel, what: str, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        raise CheckFailed(
            f"{kernel.label}: asked about {what}, it raised {type(error).__name__}: "
            f"{error}; return None or a sentence"
        ) from error


def _sentence(kernel: Kernel, what: str, found: Any) -> None:
    fine = found is None or (isinstance(found, str) and found.strip() != "")
    require(
        fine,
        f"{kernel.label}: asked about {what}, it answered {found!r}; accepted: None "
        "or a sentence",
    )
