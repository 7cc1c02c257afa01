"""Checks of capabilities that no step shows: each is named where it is wrong."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.backend.bandwidth import Bandwidth
from inl.backend.base import (
    ContextLengths,
    ForkSafety,
    PackedKernels,
    StorageDtypes,
    WeightUpdates,
)
from inl.backend.tunable import Facts, Tunable
from inl.dtypes import cast, rounded, widen
from inl.errors import OutOfMemory, RequestError, message
from inl.ops import catalog, unknown_op
from inl.ops.linear import Linear
from inl.spec.cache import Paged
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.op import Case
from inl.testing.check import Check, CheckFailed, Measure, equal, require, worst
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from inl.testing.prepared_checks import CAPABILITIES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.spec.op import OpSpec
    from inl.testing.target import Target

ENDLESS: Final = 1 << 42
"""Blocks of a cache that no machine has room for: 2 PiB in float32."""
FORK_SECONDS: Final = 60.0
"""Time for a forked child to compute one product."""


def capability_checks(target: Target) -> Iterator[Check]:
    """Check what the backend offers, and what happens without memory."""
    checks: dict[str, tuple[type[Any], Callable[[Target, Any], Measure | None]]] = {
        "bandwidth": (Bandwidth, _bandwidth),
        "context lengths": (ContextLengths, _lengths),
        "fork": (ForkSafety, _fork),
        "packed kernels": (PackedKernels, _packed_kernels),
        "storage dtypes": (StorageDtypes, _storage),
        "tunable": (Tunable, _tunable),
        **CAPABILITIES,
    }
    for name, (kind, run) in checks.items():
        if (offered := target.backend.offers(kind)) is not None:
            yield Check("backend", f"backend/{name}", partial(run, target, offered))
    if (updates := target.backend.offers(WeightUpdates)) is not None:
        for dtype in target.dtypes:
            run_updates = partial(_weights, target, updates, dtype)
            yield Check("backend", f"backend/weights/{dtype}", run_updates)
    if target.contract >= (2, 0):  # before, a state could raise any error
        yield Check("backend", "backend/out of memory", partial(_no_memory, target))
    if target.backend.traits.readers > 1:
        yield Check("backend", "backend/readers", partial(_readers, target))


def _no_memory(target: Target) -> None:
    """A state that does not fit raises OutOfMemory, and the backend goes on."""
    backend = target.backend
    size, spec = backend.traits.block_size, (Paged((0,), 2, 64, target.dtypes[0]),)
    least = Limits(
        slots=2, blocks=(3,), block_size=size, max_blocks_per_seq=2, vocab=5,
        sampler="greedy",
    )  # fmt: skip
    endless = Limits(
        slots=2, blocks=(ENDLESS,), block_size=size, max_blocks_per_seq=2, vocab=5,
        sampler="greedy",
    )  # fmt: skip
    raised: Exception | None = None
    try:
        backend.state(spec, limits=endless)
    except Exception as error:
        raised = error
    if not isinstance(raised, OutOfMemory):
        found = (
            f"raised {type(raised).__name__}: {message(raised)}" if raised else "none"
        )
        raise CheckFailed(
            f"state of {ENDLESS:,} blocks: found {found:.300}, expected "
            "inl.errors.OutOfMemory with the size: the core then says how to make room"
        ) from raised
    backend.state(spec, limits=least)


def _weights(target: Target, updates: WeightUpdates, dtype: str) -> None:
    """A replaced weight has new contents, other tensors keep theirs.

    A product that was begun before has the old ones.
    """
    backend, rng = target.backend, target.rng("weights", dtype)
    old, new = (rounded(rng.standard_normal((24, 16)), dtype) for _ in range(2))
    x = rounded(rng.standard_normal((3, 16)), dtype)
    weight, twin = (backend.tensor(cast(old, dtype)) for _ in range(2))
    case = Case("weights", (x, Linear(old)))
    op_call = OpCall(target, catalog()["linear"], case, dtype)
    ops = op_call.ops()
    rows = backend.tensor(cast(x, dtype))
    is_plain = type(op_call.arguments(ops)[1]) is Linear
    before = ops.linear(rows, Linear(weight)) if is_plain else None
    result = updates.replace(weight, cast(new, dtype))
    what = f"WeightUpdates.replace in {dtype}"
    equal(f"{what}: shape", tuple(result.shape), tuple(twin.shape))
    after = ops.linear(rows, Linear(result)) if is_plain else None

    def found(tensor: Any) -> NDArray[Any]:
        return np.asarray(widen(backend.numpy(tensor)), np.float64)

    require(
        np.array_equal(found(result), new),
        f"{what}: the tensor that it returned has other contents than the new data",
    )
    require(np.array_equal(found(twin), old), f"{what}: changed another tensor")
    for product, values, when in ((before, old, "before"), (after, new, "after")):
        if product is None:
            continue
        verdict = judged(op_call, Case("weights", (x, Linear(values))), found(product))
        require(
            verdict.passed,
            f"{what}: a product that was begun {when} the replacement is that of other "
            f"weights ({verdict}); overwrite in the order of the device's work",
        )


def _storage(target: Target, storage: StorageDtypes) -> None:
    require(len(storage.dtypes) > 0, "StorageDtypes.dtypes: found none")
    for dtype in storage.dtypes:
        backend = storage.storing(dtype)
        equal(f"dtypes of storing({dtype!r})", backend.traits.dtypes, (dtype,))
        equal(f"device of storing({dtype!r})", backend.device, target.backend.device)
        values = rounded(target.rng("storing").standard_normal((5, 7)), dtype)
        found = widen(backend.numpy(backend.tensor(cast(values, dtype))))
        require(
            np.array_equal(np.asarray(found, np.float64), values),
            f"storing({dtype!r}): values changed in a round trip",
        )


def _packed_kernels(target: Target, packed: PackedKernels) -> None:
    known = {kernel.label for kernel in target.selection.kernels}
    for kernel in packed.kernels():
        require(isinstance(kernel, Kernel), f"PackedKernels: found {kernel!r}")
        require(
            kernel.op in catalog(), f"kernel {kernel.label}: {unknown_op(kernel.op)}"
        )
        require(kernel.label not in known, f"kernel {kernel.label}: listed twice")
        known.add(kernel.label)


def _lengths(_target: Target, offered: ContextLengths) -> None:
    limits = Limits(
        slots=9, blocks=(65,), block_size=16, max_blocks_per_seq=999, vocab=9
    )
    for length in offered.lengths(limits):
        require(
            type(length) is int and length > 0,
            f"ContextLengths.lengths: found {length!r}, accepted: tokens, from 1",
        )


def _bandwidth(_target: Target, offered: Bandwidth) -> None:
    found = offered.bytes_per_second()
    require(
        isinstance(found, (int, float)) and 1e6 < found < 1e15 and math.isfinite(found),
        f"Bandwidth.bytes_per_second: found {found!r}, expected bytes in a second",
    )


def _product(target: Target) -> OpCall:
    op = catalog()["linear"]
    (case, *_) = op.cases(target.rng("product"))
    return OpCall(target, op, case, target.dtypes[0])


def _require_product(target: Target) -> Measure:
    op_call = _product(target)
    result = run_checked(op_call, target.seed)
    return require_passed(judged(op_call, op_call.case, result), op_call, target.seed)


def _fork(target: Target, _offered: ForkSafety) -> None:
    """A forked child computes what its parent does, and its parent goes on."""
    if not hasattr(os, "fork"):
        return
    _require_product(target)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_in_child, args=(target,))
    child.start()
    child.join(FORK_SECONDS)
    status = child.exitcode
    if status is None:
        child.kill()
        child.join()
    found = (
        f"did not end in {FORK_SECONDS:g} s" if status is None else f"ended: {status}"
    )
    require(
        status == 0,
        f"ForkSafety: a forked child that computed one product {found}, expected "
        "status 0; start threads again with inl.forks.on_fork, or do not offer it",
    )
    _require_product(target)


def _in_child(target: Target) -> None:
    status = 1
    try:
        _require_product(target)
        status = 0
    finally:
        os._exit(status)  # no cleanup of what belongs to the parent


def _tunable(target: Target, tunable: Tunable) -> Measure | None:
    """Kernels of some configs of each op are right, and unknown configs are refused."""
    facts = tunable.facts()
    valid = isinstance(facts, Facts) and all(isinstance(each, str) for each in facts)
    require(valid, f"Tunable.facts: found {facts!r}, accepted: Facts of texts")
    try:
        tunable.kernel("linear", {"no such parameter": 7})
    except RequestError:
        pass
    except Exception as error:
        raise CheckFailed(
            f"Tunable.kernel with an unknown config raised {type(error).__name__}, "
            "expected RequestError"
        ) from error
    else:
        raise CheckFailed("Tunable.kernel: accepted an unknown config")
    if not target.full:
        return None
    measures: list[Measure] = []
    for op in target.ops.values():
        for case in list(op.cases(target.rng("tunable", op.name)))[-1:]:
            if case.since <= target.contract:
                measures += _configs(target, tunable, op, case)
    return worst(measures) if measures else None


def _configs(
    target: Target, tunable: Tunable, op: OpSpec, case: Case
) -> Iterator[Measure]:
    """Check the first, middle and last config of each axis, beside the first others."""
    dtype = target.dtypes[0]
    specs = OpCall(target, op, case, dtype).specs
    axes = [
        axis for axis in tunable.search_space(op.name, *specs, **case.attrs) if axis
    ]
    first = {name: value for axis in axes for name, value in axis[0].items()}
    for axis in axes:
        for index in dict.fromkeys((0, len(axis) // 2, len(axis) - 1)):
            config = {**first, **axis[index]}
            kernel = tunable.kernel(op.name, config)
            equal(f"Tunable.kernel({op.name!r}): its op", kernel.op, op.name)
            op_call = OpCall(target.with_kernel(kernel), op, case, dtype)
            if op_call.choice().kernel is not kernel:
                continue
            note = f"; tuned: {config}"
            result = run_checked(op_call, target.seed, note)
            verdict = judged(op_call, case, result, kernel.activation_quant)
            yield require_passed(verdict, op_call, target.seed, note)


def _readers(target: Target) -> None:
    """Threads that load weights at the same time get their own tensors."""
    backend, readers = target.backend, target.backend.traits.readers
    rng = target.rng("readers")
    arrays = [rng.standard_normal((64, 48)) for _ in range(64)]
    dtype = target.dtypes[0]

    def packed(values: NDArray[Any]) -> Any:
        tensor = backend.tensor(cast(values.astype(np.float32), dtype))
        case = Case("readers", (values[:2], Linear(values)))
        op_call = OpCall(target, catalog()["linear"], case, dtype)
        ops = op_call.ops()
        return tensor, op_call, ops, op_call.arguments(ops)

    with ThreadPoolExecutor(readers) as pool:
        made = list(pool.map(packed, arrays))
    for values, (tensor, op_call, ops, args) in zip(arrays, made, strict=True):
        found = np.asarray(widen(backend.numpy(tensor)), np.float64)
        require(
            np.array_equal(found, rounded(values.astype(np.float32), dtype)),
            f"tensor: {readers} threads at the same time got each other's values; "
            "Traits.readers says that they may call it",
        )
        result = op_call.fetch(op_call.result(ops, args))
        verdict = judged(op_call, op_call.case, result)
        require(
            verdict.passed,
            f"{op_call.choice().winner}: weights that {readers} threads packed at the "
            f"same time are wrong ({verdict}); Traits.readers says that they may",
        )
