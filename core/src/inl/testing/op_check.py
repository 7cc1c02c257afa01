"""Checks one call of an op: that it runs, the form of its result, and its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.dtypes import E4M3, FLOATS, cast, wrap
from inl.errors import NOTE, NoKernel, message
from inl.spec.cache import Cache
from inl.spec.kernel import PLAIN
from inl.spec.step import Step
from inl.spec.strict_array import StrictArray
from inl.spec.tolerance import Verdict, judge
from inl.spec.tree import leaves, tree_map
from inl.testing.blame import first_raising_op, first_wrong_op
from inl.testing.check import CheckFailed, Fault, Measure
from inl.testing.op_call import OpCall, values, without_caches

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.dispatch import ResolvedOps
    from inl.spec.op import Case


def run_checked(
    op_call: OpCall, seed: int, note: str = "", *, twice: bool = False
) -> Any:
    """Run a call and return its result as NumPy arrays.

    twice: run it again, on the state that the first call returned. Raises
    :class:`CheckFailed`, which names the kernel, if the call raises or if a result has
    an unexpected shape or dtype; :class:`~inl.errors.NoKernel` if there is no kernel.
    """
    ops, args = _ready(op_call, seed, note)
    before = dict(_unconsumed(op_call, args))
    try:
        _free_spoiled_memory(op_call)
        result = (
            op_call.second_result(ops, args) if twice else op_call.result(ops, args)
        )
        _check_form(op_call, result, seed, note)
        _check_not_shared(op_call, args, result, seed, note)
        fetched = op_call.fetch(result)
        _check_unchanged(op_call, args, before, seed, note)
        return fetched
    except CheckFailed:
        raise
    # Any exception of a third-party kernel is a failure of this check.
    except Exception as error:
        what = f"raised {type(error).__name__}: {message(error)}"
        named = any(n.startswith(NOTE) for n in getattr(error, "__notes__", ()))
        kernel = "" if named else first_raising_op(op_call, error)
        if kernel:
            note += f"; of the ops that it calls, {kernel} raises it"
        raise failed(op_call, "raises", what, seed, note, cause=kernel) from error


def _ready(
    op_call: OpCall, seed: int, note: str
) -> tuple[ResolvedOps, tuple[Any, ...]]:
    """Return the resolved ops and the arguments on the device.

    Raises :class:`CheckFailed`, which names the kernel, if it cannot pack its weights.
    """
    ops = op_call.ops()
    try:
        return ops, op_call.arguments(ops)
    except NoKernel:
        raise
    except Exception as error:
        if op_call.layout == PLAIN:
            raise
        what = f"pack raised {type(error).__name__}: {message(error)}"
        raise failed(op_call, "raises", what, seed, note) from error


def _unconsumed(op_call: OpCall, args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and a copy of every array that the op may not change.

    Weights and caches in layouts of the backend are left out.
    """
    spec = op_call.spec
    free = {*spec.consumes, *spec.overwrites, "loras"}
    for name, arg in zip(spec.parameters, args, strict=True):
        if name in free or not _is_plain(op_call, name, arg):
            continue
        given = arg._replace(plan={}) if isinstance(arg, Step) else arg
        for label, x in _arrays(given, name):
            yield label, np.array(values(op_call.target.backend.numpy(x)))


def _is_plain(op_call: OpCall, name: str, arg: Any) -> bool:
    """Whether an argument is not in a layout of the backend."""
    if isinstance(arg, Cache):
        return not op_call.custom_cache
    return name != "w" or type(arg) is op_call.spec.weights


def _free_spoiled_memory(op_call: OpCall) -> None:
    """Give NaN to the allocator in the sizes of the results.

    A kernel that leaves a part of its result unwritten then often finds them there,
    not zeros of fresh memory.
    """
    tensor = op_call.target.backend.tensor
    for spec in leaves(op_call.expected_specs):
        if isinstance(spec, StrictArray) and spec.dtype in FLOATS:
            tensor(cast(np.full(spec.shape, np.nan), spec.dtype))


def _check_not_shared(
    op_call: OpCall, args: Sequence[Any], result: Any, seed: int, note: str
) -> None:
    """Require that results in host memory are not parts of weights or of state."""
    numpy, expected = op_call.target.backend.numpy, op_call.expected_specs
    if op_call.custom_cache:
        result = without_caches(result, expected)

    def host(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else numpy(x).data

    pairs = _pairs(result, expected, "result")
    found = [host(x) for _, x, spec in pairs if x is not spec and x is not None]
    for name, arg in zip(op_call.spec.parameters, args, strict=True):
        lasts = name in LASTING and name not in op_call.spec.consumes
        if not lasts or not _is_plain(op_call, name, arg):
            continue
        for label, x in _arrays(arg, name):
            if any(np.may_share_memory(host(x), each) for each in found):
                what = (
                    f"result shares memory with its argument {label!r}, which lasts; "
                    "return a copy, since a later op may write to a result"
                )
                raise failed(op_call, "argument", what, seed, note)


LASTING: Final = frozenset({"w", "cache", "table", "tables"})
"""Arguments that live longer than a step."""


def _arrays(arg: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a named tuple, by field, or the array itself."""
    if arg is None or isinstance(arg, Mapping):
        return
    if isinstance(arg, tuple):
        for field, x in zip(getattr(arg, "_fields", ()), arg, strict=False):
            yield from _arrays(x, f"{name}.{field}")
    else:
        yield name, arg


def _check_unchanged(
    op_call: OpCall,
    args: Sequence[Any],
    before: Mapping[str, Any],
    seed: int,
    note: str,
) -> None:
    for name, found in _unconsumed(op_call, args):
        if not np.array_equal(found, before[name], equal_nan=found.dtype.kind == "f"):
            what = (
                f"changed its argument {name!r}, which the op does not consume; write "
                "the result to memory of its own"
            )
            raise failed(op_call, "argument", what, seed, note)


def judged(op_call: OpCall, case: Case, result: Any, quant: str = "") -> Verdict:
    """Compare a result with the op's body on ``case``."""
    return judge(op_call.spec, case, op_call.dtype, result, quant)


def require_passed(
    verdict: Verdict, op_call: OpCall, seed: int, note: str = ""
) -> Measure:
    """Return the measure of a verdict; raise :class:`CheckFailed` if it failed."""
    measure = Measure(verdict.error, verdict.bound)
    if verdict.passed:
        return measure
    kind = "NaN" if "NaN" in verdict.problem else "value"
    kernel, found = first_wrong_op(op_call)
    if kernel:
        note += f"; of the ops that it calls, {kernel} is wrong first: {found}"
    raise failed(op_call, kind, str(verdict), seed, note, measure, kernel)


def failed(
    op_call: OpCall,
    kind: str,
    what: str,
    seed: int,
    note: str = "",
    measure: Measure | None = None,
    cause: str = "",
) -> CheckFailed:
    """Return an error that names the kernel, the case, the dtype and the seed.

    cause: kernel at fault, if it is another one than that of the call.
    """
    op, winner = op_call.spec.name, op_call.choice().winner
    others = frozenset(op_call.kernels - {winner})
    return CheckFailed(
        f"{winner} on {op_call.target.backend.device}: {what}; case "
        f"{op_call.case.name} in {op_call.dtype}, seed {seed}{note}; compare with the "
        f"body of {cause.partition('/')[0] or op}, or list a gap",
        measure,
        Fault(winner, kind, others, cause),
    )


def _check_form(op_call: OpCall, result: Any, seed: int, note: str) -> None:
    """Require the structure, shapes and dtypes that the op's definition gives."""
    expected = op_call.expected_specs
    backend = op_call.target.backend
    problem = _structure(result, expected, "result")
    if problem:
        raise failed(op_call, "shape", problem, seed, note)
    if op_call.custom_cache:
        result = without_caches(result, expected)
    for name, found, spec in _pairs(result, expected, "result"):
        if found is spec:  # a cache in a layout of the backend
            continue
        host = found if isinstance(found, np.ndarray) else backend.numpy(found)
        host = wrap(host) if isinstance(host, np.ndarray) else host
        shape = tuple(host.shape)
        if shape != spec.shape:
            what = f"{name} has shape {shape}, expected {spec.shape}"
            raise failed(op_call, "shape", what, seed, note)
        stored = stored_dtype(backend, spec.dtype)
        if host.dtype != stored and (host.dtype, spec.layout) != ("int64", INDEX):
            what = f"{name} has dtype {host.dtype}, expected {stored}"
            raise failed(op_call, "dtype", what, seed, note)


INDEX = "index"
"""Layout of the arrays of a step in expected results: they may be int64."""


def _as_index(spec: StrictArray) -> StrictArray:
    return StrictArray(spec.shape, spec.dtype, layout=INDEX)


def stored_dtype(backend: Backend, dtype: str) -> str:
    """Return the dtype in which a backend stores host arrays of ``dtype``.

    It differs from ``dtype`` for backends whose tensors do not carry one, such as the
    reference backend.
    """
    if dtype == E4M3:  # the bodies of ops store its numbers as float32
        plain = stored_dtype(backend, "bfloat16") == "bfloat16"
        return dtype if plain else stored_dtype(backend, "float32")
    zeros = np.zeros(1, np.float64 if "float" in dtype else dtype)
    host = cast(zeros, dtype) if "float" in dtype else wrap(zeros)
    return str(backend.numpy(backend.tensor(host)).dtype)


def _structure(found: Any, expected: Any, name: str) -> str:
    """Return how the nesting of a result differs; empty if it does not."""
    if isinstance(found, Mapping) and isinstance(expected, tuple) and not expected:
        return ""  # the plan of a step is whatever its kernels need
    if isinstance(expected, Mapping):
        same = isinstance(found, Mapping) and found.keys() == expected.keys()
        return "" if same else f"{name} is not a mapping with {sorted(expected)}"
    if isinstance(expected, Cache):
        return ""  # a backend may have a layout of its own
    if not isinstance(expected, tuple):
        lost = found is None and expected is not None
        return f"{name} is None, expected a tensor" if lost else ""
    kind = type(expected).__name__
    if not isinstance(found, tuple) or len(found) != len(expected):
        size = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        return (
            f"{name} is a {type(found).__name__}{size}, expected a {kind} of "
            f"{len(expected)}"
        )
    parts = enumerate(zip(found, expected, strict=True))
    problems = (_structure(*pair, f"{name}[{index}]") for index, pair in parts)
    return next(filter(None, problems), "")


def _pairs(found: Any, expected: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, found, expected) of every tensor, in order."""
    if expected is None or (isinstance(found, Mapping) and not expected):
        return
    if isinstance(expected, Mapping):
        for key in expected:
            yield from _pairs(found[key], expected[key], f"{name}[{key!r}]")
    elif isinstance(expected, tuple):
        if isinstance(expected, Step):
            expected = tree_map(_as_index, expected)
        fields = getattr(expected, "_fields", ())
        labels = [f".{f}" for f in fields] or [f"[{i}]" for i in range(len(expected))]
        for label, one, other in zip(labels, found, expected, strict=True):
            yield from _pairs(one, other, f"{name}{label}")
    else:
        yield name, found, expected
