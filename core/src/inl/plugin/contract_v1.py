"""Adapter for plugins of contract 1: their backends follow contract 2 unchanged.

What contract 2 added since is left out for them: ops and cases with a newer
:attr:`~inl.spec.op.OpSpec.since`, and capabilities that they do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.backend.base import Backend, Program
    from inl.spec.program import ProgramInfo
    from inl.spec.step import Bucket

GROUP_OF_V1 = "inl.v1"
"""Entry-point group of contract 1."""

LAST_OF_V1 = (1, 2)
"""The last version of contract 1, and that of its plugins without INL_CONTRACT."""


def adapted(backend: Backend, *, by_file: bool = False) -> Backend:
    """Return a backend of contract 1 as one of contract 2: the same object.

    Its own kernels get it as an argument, so that it is not wrapped. by_file: it is a
    rank of :mod:`inl.plugin.ranks_v1`.
    """
    from inl.backend.programs import takes_info

    methods = vars(backend)
    for name in ("compile", "offers"):
        # A backend that opens a copy of itself has copied the adapted methods.
        if getattr(methods.get(name), "__module__", "") == __name__:
            del methods[name]
    if not takes_info(backend.compile):
        methods["compile"] = _without_info(backend.compile)
    methods["offers"] = _adapting(backend.offers, by_file=by_file)
    return backend


def _without_info(compile: Callable[..., Program]) -> Callable[..., Program]:  # noqa: A002
    """Return a ``compile`` that calls one of contract 1.1."""

    def compiled(
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],
        info: ProgramInfo,  # noqa: ARG001
    ) -> Program:
        return compile(function, bucket, consumes=consumes)

    return compiled


def _adapting(
    offers: Callable[[type[Any]], Any], *, by_file: bool
) -> Callable[[type[Any]], Any]:
    """Return an ``offers`` whose capabilities open adapted backends."""

    def offered(kind: type[Any]) -> Any:
        from inl.backend.base import Collectives, Ranks, StorageDtypes
        from inl.backend.collectives import TENSOR
        from inl.placement.mesh import Meshes
        from inl.plugin.ranks_v1 import TensorCollectives, joining_by_file

        offer = offers(kind)
        if offer is None:
            return None
        if kind is Collectives and by_file:
            return TensorCollectives(offer)
        if kind is Ranks:
            if offer.axes != (TENSOR,):  # contract 1 has no axes
                return offer._replace(joining=_opening(offer.joining))
            joining = joining_by_file(offer.joining)
            return offer._replace(joining=_opening(joining, by_file=True))
        if kind is StorageDtypes:
            return offer._replace(storing=_opening(offer.storing, by_file=by_file))
        if kind is Meshes:
            return offer._replace(over=_opening(offer.over))
        return offer

    return offered


def _opening(
    opens: Callable[[Any], Backend], *, by_file: bool = False
) -> Callable[[Any], Backend]:
    """Return a function that opens an adapted backend."""
    return lambda value: adapted(opens(value), by_file=by_file)
