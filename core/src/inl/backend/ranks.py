"""The kernels of one device, made to compute one rank's part of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inl.backend.base import Collectives
from inl.spec.kernel import Kernel
from inl.spec.op import CATALOG, OpSpec

if TYPE_CHECKING:
    from inl.backend.base import Backend

AXIS = "tensor"
"""Name of the axis that a tensor-parallel group shares."""


def collectives_of(backend: Backend) -> Collectives | None:
    """The group that a backend is one of, or ``None`` where it is alone."""
    return backend.offers(Collectives)  # type: ignore[type-abstract]


def count_ranks(backend: Backend) -> int:
    """Ranks of that group; 1 where a backend is alone."""
    collectives = collectives_of(backend)
    return 1 if collectives is None else collectives.size(AXIS)


def over_ranks(kernels: Iterable[Kernel], collectives: Collectives) -> Iterator[Kernel]:
    """Give every kernel what its op sums over the ranks, and bring the sums' own.

    A kernel of one device may fuse a sum away, for over one rank it is the identity:
    it is handed the whole sum instead (:attr:`~inl.spec.op.OpSpec.reduces`).
    """
    own: dict[str, Callable[..., Any]] = {
        "all_reduce": collectives.all_reduce,
        "all_gather": collectives.all_gather,
    }
    for kernel in kernels:
        spec = CATALOG[kernel.op]
        if spec.reduces:
            invariant = kernel.invariant and collectives.invariant
            run = _summed(spec, kernel, collectives)
            yield replace(kernel, run=run, invariant=invariant)
        elif kernel.op not in own:
            yield kernel
    for op, run in own.items():
        yield Kernel(op, "ranks", run, invariant=collectives.invariant)


def _summed(
    spec: OpSpec, kernel: Kernel, collectives: Collectives
) -> Callable[..., Any]:
    place = spec.parameters.index(spec.reduces)

    def run(*args: Any, **attrs: Any) -> Any:
        total = collectives.all_reduce(args[place], AXIS)
        return kernel.run(*args[:place], total, *args[place + 1 :], **attrs)

    return run
