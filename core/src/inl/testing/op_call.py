"""Runs one case of an op on a device, with the kernel that an engine would select."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from inl.checkpoints.blocks.dtypes import dequantize
from inl.dtypes import E4M3, HostArray, cast, widen, wrap
from inl.spec.cache import Cache, KvScales, Paged
from inl.spec.dispatch import ResolvedOps, Tracer
from inl.spec.kernel import PLAIN
from inl.spec.limits import Limits
from inl.spec.op import Case, OpSpec, Spec
from inl.spec.selection import Choice, select_kernel
from inl.spec.step import Bucket, Step
from inl.spec.strict_array import StrictArray
from inl.spec.tolerance import stored, truth
from inl.spec.tree import leaves, tree_map
from inl.spec.weights import Group, Param
from inl.testing.tiny import MemoryCheckpoint
from inl.weights.load import load_weights
from inl.weights.plan import WeightPlan, plan_weights

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.selection import KernelSelection

ROTATIONS = ("cos", "sin")
"""Arguments that are float32 in every storage dtype."""


class DeviceContext(Protocol):
    """A backend and the kernels to select from, such as a ``Target``."""

    @property
    def backend(self) -> Backend: ...

    @property
    def selection(self) -> KernelSelection: ...


class OpCall:
    """A case of an op on the device of ``target``.

    Weights go through the loader, so that kernels get them in their own layout.
    ``packed`` overrides weights of the case by name with quantized ones. Running it
    raises :class:`~inl.errors.NoKernel` if every kernel refuses.
    """

    def __init__(
        self,
        target: DeviceContext,
        spec: OpSpec,
        case: Case,
        dtype: str,
        packed: Mapping[str, HostArray] = MappingProxyType({}),
    ) -> None:
        self.target, self.spec, self.case, self.dtype = target, spec, case, dtype
        self._packed = packed
        self._plan = self._make_plan()
        self.specs = tuple(
            self._specs(name, value)
            for name, value in zip(spec.parameters, case.args, strict=True)
        )
        self.expected_specs: Any = None
        """Shapes and dtypes of the result; set by :meth:`ops`."""
        self.kernels: set[str] = set()
        """Display names of what computes the op and the ops that it calls; set by
        :meth:`ops`."""
        self._writes: tuple[Choice, ...] = ()
        self.custom_cache = False
        """Whether caches have a backend-specific layout; set by :meth:`arguments`."""

    @property
    def layout(self) -> str:
        """Layout of the weights; that of plain tensors without weights."""
        return PLAIN if self._plan is None else self._plan.layout

    def choice(self) -> Choice:
        """Return the kernel selection for the case; it may be "missing"."""
        return select_kernel(
            self.spec, self.specs, self.case.attrs, self.target.selection
        )

    def run(self) -> Any:
        """Run the case once and return its result as NumPy arrays."""
        return self.fetch(self.result(*self.ready()))

    def result(self, ops: ResolvedOps, args: tuple[Any, ...]) -> Any:
        """Run the case once and return its result on the device."""
        return getattr(ops, self.spec.name)(*args, **self.case.attrs)

    def second_result(self, ops: ResolvedOps, args: tuple[Any, ...]) -> Any:
        """Run the case again on the state that the first call returned."""
        index = self.spec.parameters.index(self.spec.consumes[0])
        state = returned_state(self.result(ops, args))
        return self.result(ops, (*args[:index], state, *args[index + 1 :]))

    def ready(self) -> tuple[ResolvedOps, tuple[Any, ...]]:
        """Return the resolved ops and the arguments on the device."""
        ops = self.ops()
        return ops, self.arguments(ops)

    def ops(self) -> ResolvedOps:
        """Trace the call and return its resolved ops."""
        tracer = Tracer(self.target.selection, self._bucket(), self._block_size())
        self.expected_specs = getattr(tracer, self.spec.name)(
            *self.specs, **self.case.attrs
        )
        self.kernels = {
            choice.winner
            for choices in tracer.choices.values()
            for choice in choices.values()
        }
        if any(isinstance(arg, Cache) for arg in self.specs):
            self._trace_writes(tracer)
        return ResolvedOps(tracer)

    def arguments(self, ops: ResolvedOps) -> tuple[Any, ...]:
        """Return the arguments on the device, with the steps planned by ``ops``."""
        wide = np.float64 if self.dtype == "float64" else np.float32
        rounded = stored(self.case, self.dtype, wide)
        names = self.spec.parameters
        args = tuple(
            self._tensors(ops, name, before, after)
            for name, before, after in zip(names, self.case.args, rounded, strict=True)
        )
        return self.plan_steps(ops, args)

    def plan_steps(self, ops: ResolvedOps, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the plan of each step by that of the selected kernels."""
        size = self._block_size()
        return tuple(
            arg._replace(plan=ops.plan(arg, block_size=size))
            if isinstance(arg, Step)
            else arg
            for arg in args
        )

    def fetch(self, result: Any) -> Any:
        """Convert a result to NumPy arrays.

        A cache in a backend-specific layout is replaced by the expected one: its
        contents are checked through attention, which reads them.
        """
        if self.custom_cache:
            expected = truth(self.spec, self.case, self.dtype)
            result = without_caches(result, expected)
        backend = self.target.backend
        return tree_map(
            lambda x: x if isinstance(x, np.ndarray) else values(backend.numpy(x)),
            result,
        )

    def _make_plan(self) -> WeightPlan | None:
        if self.spec.weights is None:
            return None
        w = self.case.args[self.spec.parameters.index("w")]
        shapes = {key: x.shape for key, x in w._asdict().items() if x is not None}
        group = Group(
            self.spec.name, **{key: Param(key, shape) for key, shape in shapes.items()}
        )
        kinds = {key: np.asarray(getattr(w, key)).dtype for key in shapes}
        specs = {
            key: Spec(shape, kind.name if kind.kind == "i" else self.dtype)
            for (key, shape), kind in zip(shapes.items(), kinds.values(), strict=True)
        }
        for key, array in self._packed.items():
            specs[key] = Spec(array.shape, array.dtype)
        plan: WeightPlan = plan_weights(group, self.target.selection.kernels, specs)
        return plan

    def _specs(self, name: str, value: Any) -> Any:
        if name == "w" and self._plan is not None:
            return self._plan.specs(self.dtype)
        dtype = "float32" if name in ROTATIONS else self.dtype

        def spec(leaf: Any) -> StrictArray:
            array = np.asarray(leaf)
            name = array.dtype.name
            return StrictArray(array.shape, dtype if name == "float64" else name)

        specs = tree_map(spec, value)
        if isinstance(value, Cache) and value.scales is not None:
            numbers = StrictArray(value.k.shape, E4M3)
            specs = specs._replace(k=numbers, v=numbers)
        return specs

    def _tensors(self, ops: ResolvedOps, name: str, before: Any, after: Any) -> Any:
        backend = self.target.backend
        if name == "w" and self._plan is not None:
            arrays = {key: x for key, x in after._asdict().items() if x is not None}
            checkpoint = MemoryCheckpoint({}, arrays | dict(self._packed))
            return load_weights(self._plan, checkpoint, backend, self.dtype)
        if isinstance(before, Cache):
            return self._cache(ops, after)
        dtype = "float32" if name in ROTATIONS else self.dtype
        originals = leaves(before)

        def tensor(leaf: Any) -> Any:
            # float64 stands for the storage dtype; other dtypes of a case are final.
            storage = np.asarray(next(originals)).dtype.name == "float64"
            return backend.tensor(cast(leaf, dtype) if storage else wrap(leaf))

        return tree_map(tensor, after)

    def _cache(self, ops: ResolvedOps, cache: Cache) -> Any:
        """Return the cache in the layout of the backend, with its contents."""
        backend = self.target.backend
        blocks, size, heads, dim = cache.k.shape
        limits = Limits(
            slots=2,
            blocks=(blocks,),
            block_size=size,
            max_blocks_per_seq=2,
            vocab=8,
            sampler="greedy",
        )
        paged = Paged((0,), heads, dim, self.dtype)
        k, v = cache.k, cache.v
        if cache.scales is not None:
            scales = KvScales(*map(float, cache.scales))
            paged = paged._replace(dtype=E4M3, scales=(scales,))
            k, v = k * scales.k, v * scales.v
        (own,) = backend.state((paged,), limits=limits).caches
        k, v = (backend.tensor(cast(part, self.dtype)) for part in (k, v))
        if isinstance(own, Cache) and cache.scales is None:
            return Cache(k, v)
        self.custom_cache = not isinstance(own, Cache)
        self.kernels |= {choice.winner for choice in self._writes}
        cells = backend.tensor(wrap(np.arange(blocks * size, dtype=np.int32)))
        flat = (blocks * size, heads, dim)
        return ops.write_kv(k.reshape(*flat), v.reshape(*flat), own, cells)

    def _trace_writes(self, tracer: Tracer) -> None:
        cache = next(arg for arg in self.specs if isinstance(arg, Cache))
        blocks, size, heads, dim = cache.k.shape
        rows = StrictArray((blocks * size, heads, dim), self.dtype)
        tracer.write_kv(rows, rows, cache, StrictArray((blocks * size,), "int32"))
        self._writes = tuple(tracer.choices["write_kv"].values())

    def _bucket(self) -> Bucket:
        given = self.case.attrs.get("bucket")
        if isinstance(given, Bucket):
            return given
        for arg in self.case.args:
            if isinstance(arg, Step):
                return Bucket(tokens=arg.tokens.shape[0], rows=arg.slots.shape[0])
        return Bucket(tokens=1, rows=1)

    def _block_size(self) -> int:
        caches = [arg for arg in self.case.args if isinstance(arg, Cache)]
        return int(caches[0].k.shape[1]) if caches else 4


def values(array: HostArray) -> Any:
    """Return the numbers of an array of any dtype that caches have."""
    return dequantize(array) if array.dtype == E4M3 else widen(array)


def returned_state(result: Any) -> Any:
    """Return the updated state in a result: the last item, or all of it."""
    return result[-1] if type(result) is tuple else result


def without_caches(result: Any, want: Any) -> Any:
    """Replace each cache in ``result`` by the expected one."""
    if isinstance(want, Cache):
        return want
    if type(want) is tuple:
        pairs = zip(result, want, strict=True)
        return tuple(without_caches(got, exact) for got, exact in pairs)
    if isinstance(want, Mapping):
        return {key: without_caches(result[key], want[key]) for key in want}
    return result
