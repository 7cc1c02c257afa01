"""Tries ways of computing an op, in the process that may die of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from inl.backend.base import Backend
from inl.backend.tunable import Tunable
from inl.config import EngineConfig
from inl.errors import NoKernel, RequestError
from inl.executor.model_loader import compute_dtype, in_dtype, kernel_selection
from inl.plugin import make_backend
from inl.spec.kernel import Kernel
from inl.spec.op import Case, nbytes
from inl.spec.selection import KernelSelection
from inl.spec.step import Step
from inl.spec.tolerance import Verdict, judge
from inl.spec.tree import tree_map
from inl.spec.workload import Config, TuningResults
from inl.testing.kernel_site import Site
from inl.tune.inputs import Inputs
from inl.tune.models import Call, calls, chosen

MOST_SETS = 128
"""Copies of the inputs that take turns."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be tuned."""

    device: str
    model: str | None = None
    dtype: str = "auto"
    ops: tuple[str, ...] = ()
    """All that have something to tune, if empty."""
    rows: tuple[int, ...] = (1,)
    length: int = 512
    """Tokens cached in each row; also a quarter and four times as many."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """All of them: which one a step will have is not known when it is compiled."""
        return (max(self.length // 4, 1), self.length, 4 * self.length)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A backend and what may be chosen, for a :class:`Site`."""

    backend: Backend
    selection: KernelSelection


@dataclass
class Trials:
    """The calls of a model on a device, each tried in any way that is asked for.

    Raises :class:`~inl.errors.RequestError` for a device with nothing to tune.
    """

    wanted: Wanted
    seed: int
    calls: list[Call] = field(init=False)
    _cases: dict[tuple[int, int], Case] = field(default_factory=dict)
    _ready: tuple[int, Kernel, dict[int, list[Any]]] | None = None

    def __post_init__(self) -> None:
        backend = make_backend(self.wanted.device)
        self.dtype = compute_dtype(backend, self.wanted.dtype)
        self.backend = in_dtype(backend, self.dtype)
        found = self.backend.offers(Tunable)  # type: ignore[type-abstract]
        if found is None:
            raise RequestError(
                f"{self.backend.device}: has nothing to tune; a backend that has "
                "offers inl.backend.tunable.Tunable"
            )
        self.tunable = found
        policy = kernel_selection(self.backend, EngineConfig())
        self.selection = replace(policy, tuning_results=TuningResults())
        met = [
            call
            for rows in self.wanted.rows
            for call in calls(
                self.backend, self.selection, self.wanted.model, self.dtype, rows
            )
            if self.axes(call)
        ]
        self.calls = chosen(met, self.wanted.ops)

    def axes(self, call: Call) -> Sequence[Sequence[Config]]:
        """Ways to try for a call."""
        return self.tunable.search_space(call.spec.name, *call.args, **call.attrs)

    def seconds(self, place: int, config: Config) -> float:
        """Time a call in one way; raises what it raises."""
        call, kernel = self.calls[place], self.kernel(place, config)
        ready = self._ready
        if ready is None or ready[0] != place or not _same_inputs(ready[1], kernel):
            self._ready, self._cases = None, {}
            ready = place, kernel, self._sets(place, kernel)
            self._ready = ready
        ways: list[Callable[..., Any]] = []
        for length, sets in ready[2].items():
            site = self._site(place, kernel, self.seed, length)
            ops = site.ops()
            run = getattr(ops, call.spec.name)
            planned = (site.planned(ops, args) for args in sets)
            ways += [partial(run, *args, **call.attrs) for args in planned]
        return self.tunable.seconds(self.backend, ways)

    def verdict(self, place: int, config: Config, seed: int) -> Verdict:
        """Compare a way with the op's body in float64, on inputs of ``seed``."""
        kernel = self.kernel(place, config)
        lengths = self.wanted.lengths
        site = self._site(place, kernel, seed, lengths[seed % len(lengths)])
        return judge(site.spec, site.case, self.dtype, site.run())

    def healthy(self) -> bool:
        """Whether the device still answers: an error may have broken its context."""
        import numpy as np

        from inl.dtypes import wrap

        try:
            self.backend.numpy(self.backend.tensor(wrap(np.zeros(8, np.int32))))
        except Exception:
            return False
        return True

    def kernel(self, place: int, config: Config) -> Kernel:
        """Find or make the kernel that is cut like this.

        Raises :class:`~inl.errors.NoKernel` where it refuses the call.
        """
        call = self.calls[place]
        if config:
            kernel = self.tunable.kernel(call.spec.name, config)
        else:
            plain = self._pick(place, self.selection)
            if plain is None:
                raise NoKernel(f"{call.spec.name}: no kernel of its own to begin with")
            return plain
        if self._pick(place, self._only(kernel)) is not kernel:
            reason = kernel.refuse(*call.args, **call.attrs) or "takes another layout"
            raise NoKernel(f"{kernel.label} refuses: {reason}")
        return kernel

    def _pick(self, place: int, policy: KernelSelection) -> Kernel | None:
        from inl.spec.selection import select_kernel

        call = self.calls[place]
        return select_kernel(call.spec, call.args, call.attrs, policy).kernel

    def _only(self, kernel: Kernel) -> KernelSelection:
        """The policy in which no other kernel computes the op."""
        others = (k for k in self.selection.kernels if k.op != kernel.op)
        return replace(self.selection, kernels=(kernel, *others))

    def _site(self, place: int, kernel: Kernel, seed: int, length: int) -> Site:
        call, key = self.calls[place], (place, length)
        case = self._cases.get(key) if seed == self.seed else None
        if case is None:
            inputs = Inputs([seed, place, length])
            case = inputs.case(call.spec, call.args, call.attrs, length=length)
        if seed == self.seed:
            self._cases[key] = case
        opened = _Opened(self.backend, self._only(kernel))
        return Site(opened, call.spec, case, self.dtype)

    def _sets(self, place: int, kernel: Kernel) -> dict[int, list[Any]]:
        """Inputs on the device, as many copies as overflow its last cache.

        By their length, which counts only where there are steps.
        """
        steps = any(isinstance(arg, Step) for arg in self.calls[place].args)
        lengths = self.wanted.lengths if steps else (self.wanted.length,)
        return {
            length: self._copies(place, kernel, length, len(lengths))
            for length in lengths
        }

    def _copies(self, place: int, kernel: Kernel, length: int, parts: int) -> list[Any]:
        site = self._site(place, kernel, self.seed, length)
        first = site.arguments(site.ops())
        size = parts * max(nbytes(site.specs), 1)
        count = math.ceil(1.5 * self.tunable.cache_bytes / size)
        count = min(max(count, 2), MOST_SETS // parts)
        backend = self.backend

        def copied(leaf: Any) -> Any:
            return backend.tensor(backend.numpy(leaf))

        return [first, *(tree_map(copied, first) for _ in range(count - 1))]


def _same_inputs(one: Kernel, other: Kernel) -> bool:
    return (one.layout, one.pack) == (other.layout, other.pack)
