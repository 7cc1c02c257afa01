"""Tensor parallelism: adapts the kernels of one device to a rank of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from inl.backend.base import Collectives, Ranks
from inl.errors import RunnerError
from inl.placement.mesh import TENSOR, mesh_of
from inl.spec.kernel import Kernel
from inl.spec.op import CATALOG, OpSpec

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.step import Array

AXIS = TENSOR
"""Name of the tensor-parallel axis."""


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


def selected_collectives(backend: Backend, wanted: int) -> Collectives | None:
    """Return the collectives that kernels are selected for.

    ``None`` for one rank, and for a mesh, whose kernels reduce over it. wanted: ranks
    of a group that has not started, where ``backend`` is in none.
    """
    collectives = collectives_of(backend)
    if collectives is not None or wanted == 1 or mesh_of(backend) is not None:
        return collectives
    return PlannedCollectives(backend, wanted)


@final
class PlannedCollectives(Collectives):
    """Those of ranks that have not started: kernels are selected, and none can run."""

    def __init__(self, backend: Backend, ranks: int) -> None:
        group = backend.offers(Ranks)
        self.invariant = group is not None and ranks <= group.invariant_ranks
        self._ranks = ranks

    def size(self, axis: str) -> int:  # noqa: ARG002
        return self._ranks

    def all_reduce(self, x: Array, axis: str) -> Array:
        raise self._error("all_reduce", x, axis)

    def all_gather(self, x: Array, axis: str) -> Array:
        raise self._error("all_gather", x, axis)

    def _error(self, op: str, x: Array, axis: str) -> RunnerError:
        return RunnerError(
            f"{op} of {x.shape} over {axis}: the {self._ranks} ranks have not started"
        )


def over_ranks(kernels: Iterable[Kernel], collectives: Collectives) -> Iterator[Kernel]:
    """Adapt single-device kernels to a rank group and add kernels of the collectives.

    A fused single-device kernel omits the sum over ranks, which is the identity on one
    rank. It receives the reduced tensor instead (:attr:`~inl.spec.op.OpSpec.reduces`).
    """
    collective_runs: dict[str, Callable[..., Any]] = {
        "all_reduce": collectives.all_reduce,
        "all_gather": collectives.all_gather,
    }
    for kernel in kernels:
        spec = CATALOG[kernel.op]
        if spec.reduces:
            invariant = kernel.invariant and collectives.invariant
            run = _with_reduced_argument(spec, kernel, collectives)
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
