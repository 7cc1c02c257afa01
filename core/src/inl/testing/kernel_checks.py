"""Checks of kernels: each case of each op, in each dtype of the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import E4M3, SIZES
from inl.spec.cache import Cache
from inl.spec.op import Case, OpSpec, Spec
from inl.spec.step import Step
from inl.spec.strict_array import StrictArray
from inl.spec.tolerance import Verdict, truth
from inl.spec.tree import leaves, tree_map
from inl.testing.check import Check, CheckFailed, Measure, require, worst
from inl.testing.edge_cases import edge_cases
from inl.testing.float8_cases import float8_cases
from inl.testing.large_cases import larger_cases
from inl.testing.op_call import OpCall, returned_state
from inl.testing.op_check import judged, require_passed, run_checked
from inl.testing.optional_ops import called_ops, left_out
from inl.testing.packed_checks import kind_checks, packed_checks
from inl.testing.real_sizes import real_cases
from inl.testing.wide_cases import wide_cases

if TYPE_CHECKING:
    from inl.spec.kernel import Kernel
    from inl.testing.target import Target

CasesOf = Callable[[int], list[Case]]
"""Seed -> cases."""

LARGER_ROUNDS = 1
"""Number of seeds of larger cases, which have many rows."""


def kernel_checks(target: Target) -> Iterator[Check]:
    """Check cases, poisoned cases, reused state, and refusals of each op.

    A kernel is also checked in the cases for which another one is preferred.
    """
    kernels = target.selection.kernels
    for op in ops_in_order(target):
        names = [case.name for case in _cases(target, op, 0)]
        for dtype in target.dtypes:
            yield from _op_checks(target, op, names, dtype)
            yield from _kernel_checks(target, op, names, dtype)
            yield from _part_checks(target, op, dtype)
            yield from packed_checks(target, op, dtype)
        yield from kind_checks(target, op)
        for kernel in kernels:
            if kernel.op == op.name:
                run = partial(_refusals, target, op, kernel)
                yield Check("kernel", f"{op.name}/refusals/{kernel.name}", run)


def ops_in_order(target: Target) -> list[OpSpec]:
    """Return the ops to check, each after the ops that its body calls.

    Those that the backend may leave out, and does, are not among them.
    """
    calls = {name: called_ops(op) for name, op in target.ops.items()}
    absent = left_out(target)
    chosen = target.only or [name for name in target.ops if name not in absent]
    ranks = {name: sum(map(bool, map(calls.get, calls[name]))) for name in chosen}
    order = sorted(chosen, key=lambda name: (bool(calls[name]), ranks[name]))
    return [target.ops[name] for name in order]


def _op_checks(
    target: Target, op: OpSpec, names: list[str], dtype: str
) -> Iterator[Check]:
    own = any(kernel.op == op.name for kernel in target.selection.kernels)
    if op.dtypes and dtype not in op.dtypes and not own:
        return  # models that call it are refused

    def check(name: str, run: Callable[..., Any], *args: Any) -> Check:
        bound = partial(run, target, op, *args, dtype)
        return Check("kernel", f"{op.name}/{name}/{dtype}", bound)

    half = SIZES[dtype] < SIZES["float32"]
    larger = partial(_larger, target, op, half)
    for index, name in enumerate(names):
        yield check(name, _case, partial(_cases, target, op), index, target.rounds)
    for index, case in enumerate(larger(0)):
        yield check(case.name, _case, larger, index, LARGER_ROUNDS)
    real = partial(_real, target, op)
    for index, case in enumerate(real(0)):
        yield check(case.name, _case, real, index, LARGER_ROUNDS)
    if "cache" in op.parameters and "step" in op.parameters:
        for index, name in enumerate(names):
            yield check(f"poison/{name}", _poisoned, _cases(target, op, 0)[index])
    if E4M3 in target.backend.traits.kv_dtypes:
        float8 = partial(_float8, target, op)
        for index, case in enumerate(float8(0)):
            yield check(case.name, _case, float8, index, LARGER_ROUNDS)
            if "step" in op.parameters:
                yield check(f"poison/{case.name}", _poisoned, case)
    if op.consumes and names:
        yield check("twice", _twice)


def _kernel_checks(
    target: Target, op: OpSpec, names: list[str], dtype: str
) -> Iterator[Check]:
    """Check each kernel in the cases that it supports and that others compute."""
    kernels = [one for one in target.selection.kernels if one.op == op.name]
    cases = partial(_cases, target, op)
    for kernel in kernels if len(kernels) > 1 else ():
        alone = target.with_kernel(kernel)
        for index, name in enumerate(names):
            case = cases(0)[index]
            chosen, own = (
                OpCall(each, op, case, dtype).choice().kernel
                for each in (target, alone)
            )
            if own is kernel and chosen is not kernel:
                label = f"{op.name}/by {kernel.name}/{name}/{dtype}"
                run = partial(_case, alone, op, cases, index, 1, dtype)
                yield Check("kernel", label, run)


def _part_checks(target: Target, op: OpSpec, dtype: str) -> Iterator[Check]:
    """Check each kernel that computes a part of the experts, as a rank does."""
    for kernel in target.selection.kernels:
        if kernel.op != op.name or kernel.run_part is None:
            continue
        alone = target.with_kernel(replace(kernel, run=kernel.run_part))
        cases = partial(_parts, target, op)
        for index, case in enumerate(cases(0)):
            run = partial(_case, alone, op, cases, index, 1, dtype)
            label = f"{op.name}/part by {kernel.name}/{case.name}/{dtype}"
            yield Check("kernel", label, run)


@lru_cache(maxsize=24)
def _parts(target: Target, op: OpSpec, seed: int) -> list[Case]:
    """Return cases with the middle half of the experts, and the ids of all."""
    return [_part_of(op, case) for case in _cases(target, op, seed)]


def _part_of(op: OpSpec, case: Case) -> Case:
    args = dict(zip(op.parameters, case.args, strict=True))
    experts = next(leaves(args["w"])).shape[0]
    first, count = experts // 4, -(-experts // 2)
    args["ids"] = (args["ids"] - first).astype(np.int32)
    args["w"] = tree_map(lambda x: x[first : first + count], args["w"])
    return replace(case, args=tuple(args.values()))


@lru_cache(maxsize=24)
def _cases(target: Target, op: OpSpec, seed: int) -> list[Case]:
    cases = op.cases(target.rng(op.name, seed))
    return [case for case in cases if case.since <= target.contract]


@lru_cache(maxsize=24)
def _larger(target: Target, op: OpSpec, half: bool, seed: int) -> list[Case]:
    rng = target.rng(op.name, seed, "larger")
    cases = _cases(target, op, seed)
    many = any(kernel.op == op.name for kernel in target.selection.kernels)
    return list(larger_cases(op, cases, rng, full=target.full, half=half, many=many))


@lru_cache(maxsize=2)
def _real(target: Target, op: OpSpec, seed: int) -> list[Case]:
    rng, cases = target.rng(op.name, seed, "real"), _cases(target, op, seed)
    names = [case.name for case in cases]
    return [
        *real_cases(op, names, rng, full=target.full),
        *wide_cases(op, cases, rng),
        *edge_cases(op, rng, target.backend.traits.block_size),
    ]


@lru_cache(maxsize=24)
def _float8(target: Target, op: OpSpec, seed: int) -> list[Case]:
    rng = target.rng(op.name, seed, "float8")
    return list(float8_cases(op, _cases(target, op, seed), rng))


def _case(
    target: Target, op: OpSpec, cases: CasesOf, index: int, rounds: int, dtype: str
) -> Measure:
    def run(seed: int) -> tuple[Verdict, OpCall]:
        op_call = OpCall(target, op, cases(seed)[index], dtype)
        result = run_checked(op_call, target.seed)
        return judged(op_call, op_call.case, result), op_call

    measures = []
    for seed in range(rounds):
        verdict, op_call = run(seed)
        random = op_call.case.attrs.get("sampler", "greedy") != "greedy"
        if random and not verdict.passed:
            # The uniform number may be at the border of two tokens: try another.
            verdict, op_call = run(seed + 1000)
        measures.append(require_passed(verdict, op_call, target.seed))
    return worst(measures)


def _poisoned(target: Target, op: OpSpec, case: Case, dtype: str) -> Measure:
    case = poison(op, case, np.nan)
    op_call = OpCall(target, op, case, dtype)
    note = "; unused cache slots contain NaN"
    verdict = judged(op_call, case, run_checked(op_call, target.seed, note))
    return require_passed(verdict, op_call, target.seed, note)


def _twice(target: Target, op: OpSpec, dtype: str) -> Measure:
    case = _cases(target, op, 0)[0]
    first = returned_state(truth(op, case, dtype))
    index = op.parameters.index(op.consumes[0])
    args = (*case.args[:index], first, *case.args[index + 1 :])
    op_call = OpCall(target, op, case, dtype)
    note = f"; second call, on the {op.consumes[0]} that the first call returned"
    result = run_checked(op_call, target.seed, note, twice=True)
    verdict = judged(op_call, replace(case, args=args), result)
    return require_passed(verdict, op_call, target.seed, note)


def poison(op: OpSpec, case: Case, value: float) -> Case:
    """Fill unused cache slots, and the keys and values of padding, with ``value``."""
    args = dict(zip(op.parameters, case.args, strict=True))
    step: Step = args["step"]
    cache: Cache = args["cache"]
    blocks, size = cache.k.shape[:2]
    unused = np.ones((blocks, size), bool)
    for row, length in enumerate(step.lengths):
        for position in range(int(length)):
            block = step.blocks[case.attrs.get("group", 0), row, position // size]
            unused[block, position % size] = False
    k, v = (np.where(unused[..., None, None], value, x) for x in (cache.k, cache.v))
    args["cache"] = cache._replace(k=k, v=v)
    padding = slice(int(step.used_counts[2]), None)
    for name in ("k", "v"):
        if name in args:
            args[name] = args[name].copy()
            args[name][padding] = value
    for name in ("cos", "sin"):
        if name in args:  # padding tokens share one slot and write it in any order
            args[name] = args[name].copy()
            args[name][padding] = args[name][padding][:1]
    return replace(case, args=tuple(args.values()))


def _refusals(target: Target, op: OpSpec, kernel: Kernel) -> None:
    """Call ``refuse`` and ``can_pack`` on specs that no model has.

    Both must return ``None`` or a sentence.
    """
    for case in _cases(target, op, 0)[:1]:
        op_call = OpCall(target, op, case, target.dtypes[0])
        for label, change in INVALID_SPECS.items():
            specs = tuple(tree_map(change, spec) for spec in op_call.specs)
            query = partial(kernel.refuse, *specs, **case.attrs)
            _require_reason(kernel, f"refuse({label})", query)
    if op.weights is not None:
        fields = getattr(op.weights, "_fields", ())
        for dtype in ("float32", "no_such_dtype"):
            for shape in ((), (0,), (3,), (7, 5), (2, 3, 4)):
                specs_by_name = {name: Spec(shape, dtype) for name in fields}
                query = partial(kernel.can_pack, **specs_by_name)
                _require_reason(kernel, f"can_pack({dtype} of shape {shape})", query)


INVALID_SPECS: dict[str, Callable[[StrictArray], StrictArray]] = {
    "empty tensors": lambda x: StrictArray((0,) * len(x.shape), x.dtype),
    "huge tensors": lambda x: StrictArray((1 << 40,) * len(x.shape), x.dtype),
    "an unknown dtype": lambda x: StrictArray(x.shape, "float8_unknown"),
    "odd sizes": lambda x: StrictArray(tuple(2 * n + 1 for n in x.shape), x.dtype),
}


def _require_reason(kernel: Kernel, label: str, query: Callable[[], Any]) -> None:
    """Require that ``query`` returns ``None`` or a non-empty string."""
    try:
        reason = query()
    except Exception as error:
        raise CheckFailed(
            f"{kernel.label}: {label} raised {type(error).__name__}: {error}; it must "
            "return None or a sentence"
        ) from error
    valid = reason is None or (isinstance(reason, str) and reason.strip() != "")
    require(
        valid,
        f"{kernel.label}: {label} returned {reason!r}; accepted: None or a sentence",
    )
