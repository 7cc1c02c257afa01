"""Measures and checks kernel configs; runs in a child process, which may crash."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from inl.backend.base import Backend
from inl.backend.tunable import Tunable
from inl.errors import NoKernel, RequestError
from inl.plugin import make_backend
from inl.spec.kernel import Kernel
from inl.spec.op import Case, nbytes
from inl.spec.selection import KernelSelection, select_kernel
from inl.spec.step import Step
from inl.spec.tolerance import Verdict, judge
from inl.spec.tree import tree_map
from inl.spec.workload import Config
from inl.testing.op_call import OpCall
from inl.tune.inputs import Inputs
from inl.tune.models import Call, calls, filter_calls, plan_decoding

MAX_COPIES = 128
"""Maximum number of input copies that measurements rotate through."""


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """What to tune."""

    device: str
    model: str | None = None
    dtype: str = "auto"
    ops: tuple[str, ...] = ()
    """Names of ops; empty: all tunable ops."""
    rows: tuple[int, ...] = (1,)
    """Decode batch sizes."""
    length: int = 512
    """Tokens cached per sequence."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached lengths to measure: a quarter of ``length``, itself, 4 times as many.

        A compiled step serves any length, so one config has to suit them all.
        """
        return (max(self.length // 4, 1), self.length, 4 * self.length)


@dataclass(frozen=True, slots=True)
class _Context:
    """Implements :class:`~inl.testing.op_call.DeviceContext`."""

    backend: Backend
    selection: KernelSelection


class _Prepared(NamedTuple):
    """Inputs on the device, for kernels that take the same weight layout."""

    call_index: int
    kernel: Kernel
    copies: dict[int, list[Any]]
    """Cached length -> copies of the arguments."""

    def matches(self, index: int, kernel: Kernel) -> bool:
        """Whether ``kernel`` can run on these inputs."""
        layout, pack = self.kernel.layout, self.kernel.pack
        return self.call_index == index and (layout, pack) == (
            kernel.layout,
            kernel.pack,
        )


@dataclass
class Trials:
    """Calls of a model on a device, each measurable in every config.

    Raises :class:`~inl.errors.RequestError` for a device without tunable kernels.
    """

    options: TuningOptions
    seed: int
    calls: list[Call] = field(init=False)
    _cases: dict[tuple[int, int], Case] = field(default_factory=dict)
    _prepared: _Prepared | None = None

    def __post_init__(self) -> None:
        options, backend = self.options, make_backend(self.options.device)
        tunable = backend.offers(Tunable)  # type: ignore[type-abstract]
        if tunable is None:
            raise RequestError(
                f"{backend.device}: nothing to tune: the backend has no tunable "
                "kernels, it chooses their sizes itself; docs/cli.md says by what"
            )
        self.tunable = tunable
        plans = [
            plan_decoding(backend, options.model, options.dtype, rows)
            for rows in options.rows
        ]
        self.backend, parts = plans[0].backend, plans[0].unloaded
        self.selection, self.dtype = parts.selection, parts.config.dtype
        tunable_calls = [
            call for plan in plans for call in calls(plan) if self.axes(call)
        ]
        self.calls = filter_calls(tunable_calls, options.ops)

    def axes(self, call: Call) -> Sequence[Sequence[Config]]:
        """Return the search space of a call; empty if it is not tunable."""
        return self.tunable.search_space(call.spec.name, *call.args, **call.attrs)

    def seconds(self, index: int, config: Config) -> float:
        """Measure a call with a config. Raises what the kernel raises."""
        call, kernel = self.calls[index], self.kernel(index, config)
        prepared = self._prepared
        if prepared is None or not prepared.matches(index, kernel):
            # Frees the memory of the previous inputs first.
            self._prepared, self._cases = None, {}
            prepared = _Prepared(index, kernel, self._all_copies(index, kernel))
            self._prepared = prepared
        runs: list[Callable[..., Any]] = []
        for length, copies in prepared.copies.items():
            op_call = self._op_call(index, kernel, self.seed, length)
            ops = op_call.ops()
            run = getattr(ops, call.spec.name)
            planned = (op_call.plan_steps(ops, args) for args in copies)
            runs += [partial(run, *args, **call.attrs) for args in planned]
        return self.tunable.seconds(self.backend, runs)

    def verdict(self, index: int, config: Config, seed: int) -> Verdict:
        """Compare a config with the op's body in float64, on inputs of ``seed``."""
        kernel = self.kernel(index, config)
        lengths = self.options.lengths
        op_call = self._op_call(index, kernel, seed, lengths[seed % len(lengths)])
        return judge(op_call.spec, op_call.case, self.dtype, op_call.run())

    def healthy(self) -> bool:
        """Whether the device still works: an error may have broken its context."""
        import numpy as np

        from inl.dtypes import wrap

        try:
            self.backend.numpy(self.backend.tensor(wrap(np.zeros(8, np.int32))))
        except Exception:
            return False
        return True

    def kernel(self, index: int, config: Config) -> Kernel:
        """Return the kernel with a config; the default kernel for an empty one.

        Raises :class:`~inl.errors.NoKernel` if it refuses the call.
        """
        call = self.calls[index]
        if not config:
            default = self._select(index, self.selection)
            if default is None:
                raise NoKernel(f"{call.spec.name}: the backend lists no kernel for it")
            return default
        kernel = self.tunable.kernel(call.spec.name, config)
        if self._select(index, self._with_only(kernel)) is not kernel:
            reason = kernel.refuse(*call.args, **call.attrs)
            reason = reason or "takes another weight layout"
            raise NoKernel(f"{kernel.label} refuses: {reason}")
        return kernel

    def _select(self, index: int, selection: KernelSelection) -> Kernel | None:
        call = self.calls[index]
        return select_kernel(call.spec, call.args, call.attrs, selection).kernel

    def _with_only(self, kernel: Kernel) -> KernelSelection:
        """Return a selection without other kernels of the same op."""
        others = (k for k in self.selection.kernels if k.op != kernel.op)
        return replace(self.selection, kernels=(kernel, *others))

    def _op_call(self, index: int, kernel: Kernel, seed: int, length: int) -> OpCall:
        """Return a call on random inputs; those of ``self.seed`` are cached."""
        call, key = self.calls[index], (index, length)
        case = self._cases.get(key) if seed == self.seed else None
        if case is None:
            inputs = Inputs([seed, index, length])
            case = inputs.case(call.spec, call.args, call.attrs, length=length)
        if seed == self.seed:
            self._cases[key] = case
        context = _Context(self.backend, self._with_only(kernel))
        return OpCall(context, call.spec, case, self.dtype)

    def _all_copies(self, index: int, kernel: Kernel) -> dict[int, list[Any]]:
        """Return copies of the arguments by cached length.

        Calls without a step do not depend on the length: they get one.
        """
        steps = any(isinstance(arg, Step) for arg in self.calls[index].args)
        lengths = self.options.lengths if steps else (self.options.length,)
        return {
            length: self._copies(index, kernel, length, len(lengths))
            for length in lengths
        }

    def _copies(
        self, index: int, kernel: Kernel, length: int, lengths: int
    ) -> list[Any]:
        """Return enough copies that all lengths overflow the device's last cache."""
        op_call = self._op_call(index, kernel, self.seed, length)
        first = op_call.arguments(op_call.ops())
        size = lengths * max(nbytes(op_call.specs), 1)
        count = math.ceil(1.5 * self.tunable.cache_bytes / size)
        count = min(max(count, 2), MAX_COPIES // lengths)
        backend = self.backend

        def copy(leaf: Any) -> Any:
            return backend.tensor(backend.numpy(leaf))

        return [first, *(tree_map(copy, first) for _ in range(count - 1))]
