"""Adapts the kernels of one device to a rank of a group, along tensor and expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from inl.backend.base import Collectives, Ranks
from inl.errors import RunnerError
from inl.placement.mesh import DATA, EXPERT, EXPERT_OPS, TENSOR, mesh_of
from inl.spec.kernel import Kernel
from inl.spec.op import CATALOG, OpSpec
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.placement.placement import Placement
    from inl.spec.step import Array

AXIS = TENSOR
"""Name of the tensor-parallel axis."""

EXPERT_SUMS = ("experts", "combine_experts")
"""Ops that sum over experts, hence over the ranks that share them."""


def collectives_of(backend: Backend) -> Collectives | None:
    """Return the backend's collectives, or ``None`` outside of a rank group."""
    return backend.offers(Collectives)  # type: ignore[type-abstract]


def count_ranks(backend: Backend) -> int:
    """Return the number of ranks; 1 outside of a rank group."""
    if (mesh := mesh_of(backend)) is not None:
        return mesh.sizes.tensor
    collectives = collectives_of(backend)
    return 1 if collectives is None else collectives.size(AXIS)


def planned_ranks(backend: Backend, wanted: int) -> int:
    """Return the number of ranks; that of a group to start outside of one."""
    is_divided = mesh_of(backend) is not None or collectives_of(backend) is not None
    return count_ranks(backend) if is_divided else wanted


def count_expert_ranks(backend: Backend, wanted: int = 1) -> int:
    """Return the number of ranks along "expert".

    wanted: that of a group to start, where ``backend`` is in none.
    """
    if (mesh := mesh_of(backend)) is not None:
        return mesh.sizes.expert
    return _count_along(EXPERT, backend, wanted)


def count_data_ranks(backend: Backend, wanted: int = 1) -> int:
    """Return the number of ranks that divide the rows of a step; 1 for a mesh.

    wanted: that of a group to start, where ``backend`` is in none.
    """
    return 1 if mesh_of(backend) is not None else _count_along(DATA, backend, wanted)


def _count_along(axis: str, backend: Backend, wanted: int) -> int:
    if (collectives := collectives_of(backend)) is None:
        return wanted
    ranks = backend.offers(Ranks)
    has_axis = ranks is not None and axis in ranks.axes
    return collectives.size(axis) if has_axis else 1


def expert_part(collectives: Collectives, data_ranks: int) -> tuple[Any, Any]:
    """Return which part of the experts this rank has, and its index along "expert".

    Ranks that divide the rows have different experts too.
    """
    index = collectives.index(EXPERT)
    if data_ranks == 1:
        return index, index
    return collectives.index(DATA) * collectives.size(EXPERT) + index, index


def selected_collectives(backend: Backend, wanted: Placement) -> Collectives | None:
    """Return the collectives that kernels are selected for.

    ``None`` for one rank, and for a mesh, whose kernels reduce over it. wanted: of a
    group that has not started, where ``backend`` is in none.
    """
    collectives = collectives_of(backend)
    is_whole = wanted.data * wanted.tensor * wanted.expert == 1
    if collectives is not None or is_whole or mesh_of(backend) is not None:
        return collectives
    return PlannedCollectives(backend, wanted)


@final
class PlannedCollectives(Collectives):
    """Those of ranks that have not started: kernels are selected, and none can run."""

    def __init__(self, backend: Backend, placement: Placement) -> None:
        group = backend.offers(Ranks)
        count = placement.data * placement.tensor * placement.expert
        self.invariant = group is not None and count <= group.invariant_ranks
        self._placement = placement

    def size(self, axis: str) -> int:
        return int(getattr(self._placement, axis))

    def all_reduce(self, x: Array, axis: str) -> Array:
        raise self._error("all_reduce", x, axis)

    def all_gather(self, x: Array, axis: str) -> Array:
        raise self._error("all_gather", x, axis)

    def _error(self, op: str, x: Array, axis: str) -> RunnerError:
        return RunnerError(
            f"{op} of {x.shape} over {axis}: the {self._placement.count} ranks have "
            "not started"
        )


def over_ranks(
    kernels: Iterable[Kernel], collectives: Collectives, *, expert_ranks: int = 1,
    data_ranks: int = 1,
) -> Iterator[Kernel]:  # fmt: skip
    """Adapt single-device kernels to a rank group and add kernels of the collectives.

    A fused single-device kernel omits the sum over ranks, which is the identity on one
    rank. It receives the reduced tensor instead (:attr:`~inl.spec.op.OpSpec.reduces`).
    expert_ranks: number that share the experts, of which each computes its own; kernels
    that cannot refuse every call. data_ranks: those of them that divide the rows.
    """
    collective_runs: dict[str, Callable[..., Any]] = {
        "all_reduce": collectives.all_reduce,
        "all_gather": collectives.all_gather,
    }
    for kernel in kernels:
        spec = CATALOG[kernel.op]
        invariant = kernel.invariant and collectives.invariant
        if spec.reduces:
            run = _with_reduced_argument(spec, kernel, collectives)
            yield replace(kernel, run=run, invariant=invariant)
        elif expert_ranks > 1 and kernel.op in EXPERT_OPS:
            if kernel.run_part is None:
                yield replace(kernel, refuse=_refuse_part, can_pack=_refuse_part)
                continue
            run = with_own_experts(spec, kernel.run_part, collectives, data_ranks)
            if data_ranks > 1:
                refuse = _refusing_all_rows(kernel.refuse, data_ranks)
                kernel = replace(kernel, refuse=refuse)
            part = f"computes one of {expert_ranks} parts of the experts"
            note = "; ".join(filter(None, (kernel.note, part)))
            yield replace(kernel, run=run, invariant=invariant, note=note)
        elif expert_ranks > 1 and kernel.op in EXPERT_SUMS:
            run = with_own_experts(spec, kernel.run, collectives)
            yield replace(kernel, run=run, invariant=invariant)
        elif kernel.op not in collective_runs:
            yield kernel
    for op, run in collective_runs.items():
        yield Kernel(op, "ranks", run, invariant=collectives.invariant)


def _with_reduced_argument(
    spec: OpSpec, kernel: Kernel, collectives: Collectives
) -> Callable[..., Any]:
    index = spec.parameters.index(spec.reduces)

    def run(*args: Any, **attrs: Any) -> Any:
        total = collectives.all_reduce(args[index], AXIS)
        return kernel.run(*args[:index], total, *args[index + 1 :], **attrs)

    return run


def _refuse_part(*_specs: Any, **_attrs: Any) -> str:
    return "computes all experts of a layer, not those of one of several ranks"


def with_own_experts(
    spec: OpSpec, run: Callable[..., Any], collectives: Collectives, data_ranks: int = 1
) -> Callable[..., Any]:
    """Return a kernel of an op of :data:`EXPERT_OPS` or :data:`EXPERT_SUMS`.

    Every rank along "expert" calls it with the same tokens. Ids are counted from this
    rank's first expert, so that those of other ranks' experts are outside of its own
    (:attr:`~inl.spec.kernel.Kernel.run_part`); what sums over experts is summed over
    the ranks. Other ops keep ``run``. data_ranks: those that divide the rows, each of
    which computes its experts for the rows of all.
    """
    has_ids, sums = spec.name in EXPERT_OPS, spec.name in EXPERT_SUMS
    if not has_ids and not sums:
        return run

    def run_own(*args: Any, **attrs: Any) -> Any:
        if has_ids:
            if data_ranks > 1:
                args = _with_all_rows(spec, args, collectives)
            part, _ = expert_part(collectives, data_ranks)
            args = _with_own_ids(spec, args, part)
        result = run(*args, **attrs)
        if has_ids and data_ranks > 1:
            result = collectives.reduce_scatter(result, DATA)
        return collectives.all_reduce(result, EXPERT) if sums else result

    return run_own


def _with_all_rows(
    spec: OpSpec, args: tuple[Any, ...], collectives: Collectives
) -> tuple[Any, ...]:
    """Return the arguments with the rows of all ranks that divide them."""
    at = spec.parameters.index("w")
    return *collectives.gather_rows(args[:at], DATA), *args[at:]


def _refusing_all_rows(
    refuse: Callable[..., str | None], ranks: int
) -> Callable[..., str | None]:
    """Return whether a kernel refuses the rows of all ranks, for those of one."""

    def refuse_rows(*specs: Any, **attrs: Any) -> str | None:
        *rows, weights = specs
        rows = [
            StrictArray((each.shape[0] * ranks, *each.shape[1:]), each.dtype)
            for each in rows
        ]
        return refuse(*rows, weights, **attrs)

    return refuse_rows


def _with_own_ids(spec: OpSpec, args: tuple[Any, ...], rank: Any) -> tuple[Any, ...]:
    """Return the arguments with ids that count from the first expert of ``rank``."""
    at = spec.parameters.index("ids")
    count = next(leaves(args[spec.parameters.index("w")])).shape[0]
    first = rank * count
    if isinstance(first, int) and not first:
        return args
    return *args[:at], args[at] - first, *args[at + 1 :]
