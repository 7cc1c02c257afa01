"""Tries ways of computing an op, in the process that may die of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from inl.backend.base import Backend
from inl.backend.tunable import Tunable
from inl.errors import NoKernel, RequestError
from inl.plugin import make_backend
from inl.runtime.config import EngineConfig
from inl.runtime.load import backend_policy, compute_dtype, in_dtype
from inl.spec.kernel import Kernel
from inl.spec.op import Case, nbytes
from inl.spec.table import Policy
from inl.spec.tolerance import Verdict, judge
from inl.spec.tree import tree_map
from inl.spec.workload import Config, Findings
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
    """Tokens cached in each row."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A backend and what may be chosen, for a :class:`Site`."""

    backend: Backend
    policy: Policy


@dataclass
class Trials:
    """The calls of a model on a device, each tried in any way that is asked for.

    Raises :class:`~inl.errors.RequestError` for a device with nothing to tune.
    """

    wanted: Wanted
    seed: int
    calls: list[Call] = field(init=False)
    _case: tuple[int, Case] | None = None
    _ready: tuple[int, Kernel, list[Any]] | None = None

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
        policy = backend_policy(self.backend, EngineConfig())
        self.policy = replace(policy, findings=Findings())
        met = [
            call
            for rows in self.wanted.rows
            for call in calls(
                self.backend, self.policy, self.wanted.model, self.dtype, rows
            )
            if self.axes(call)
        ]
        self.calls = chosen(met, self.wanted.ops)

    def axes(self, call: Call) -> Sequence[Sequence[Config]]:
        """Ways to try for a call."""
        return self.tunable.axes(call.spec.name, *call.args, **call.attrs)

    def seconds(self, place: int, config: Config) -> float:
        """Time a call in one way; raises what it raises."""
        call, kernel = self.calls[place], self.kernel(place, config)
        ready = self._ready
        if ready is None or ready[0] != place or not _same_inputs(ready[1], kernel):
            self._ready = None
            ready = place, kernel, self._sets(place, kernel)
            self._ready = ready
        site = self._site(place, kernel, self.seed)
        ops = site.ops()
        run: Callable[..., Any] = getattr(ops, call.spec.name)
        sets = [site.planned(ops, args) for args in ready[2]]
        ways = [partial(run, *args, **call.attrs) for args in sets]
        return self.tunable.seconds(self.backend, ways)

    def verdict(self, place: int, config: Config, seed: int) -> Verdict:
        """Compare a way with the op's body in float64, on inputs of ``seed``."""
        kernel = self.kernel(place, config)
        site = self._site(place, kernel, seed)
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
            plain = self._pick(place, self.policy)
            if plain is None:
                raise NoKernel(f"{call.spec.name}: no kernel of its own to begin with")
            return plain
        if self._pick(place, self._only(kernel)) is not kernel:
            reason = kernel.refuse(*call.args, **call.attrs) or "takes another layout"
            raise NoKernel(f"{kernel.label} refuses: {reason}")
        return kernel

    def _pick(self, place: int, policy: Policy) -> Kernel | None:
        from inl.spec.table import pick

        call = self.calls[place]
        return pick(call.spec, call.args, call.attrs, policy).kernel

    def _only(self, kernel: Kernel) -> Policy:
        """The policy in which no other kernel computes the op."""
        others = (k for k in self.policy.kernels if k.op != kernel.op)
        return replace(self.policy, kernels=(kernel, *others))

    def _site(self, place: int, kernel: Kernel, seed: int) -> Site:
        call = self.calls[place]
        case = Inputs([seed, place]).case(
            call.spec, call.args, call.attrs, length=self.wanted.length
        )
        return Site(
            _Opened(self.backend, self._only(kernel)), call.spec, case, self.dtype
        )

    def _sets(self, place: int, kernel: Kernel) -> list[Any]:
        """Inputs on the device, as many copies as overflow its last cache."""
        site = self._site(place, kernel, self.seed)
        first = site.arguments(site.ops())
        size = max(nbytes(site.specs), 1)
        count = min(max(math.ceil(1.5 * self.tunable.cache_bytes / size), 2), MOST_SETS)
        backend = self.backend

        def copied(leaf: Any) -> Any:
            return backend.tensor(backend.numpy(leaf))

        return [first, *(tree_map(copied, first) for _ in range(count - 1))]


def _same_inputs(one: Kernel, other: Kernel) -> bool:
    return (one.layout, one.prepare) == (other.layout, other.prepare)
