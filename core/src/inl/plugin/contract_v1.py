"""Adapter for plugins of contract 1: their backends follow contract 2 unchanged.

What contract 2 added since is left out for them: ops and cases with a newer
:attr:`~inl.spec.op.OpSpec.since`, and capabilities that they do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.backend.base import Backend, Program
    from inl.spec.program import ProgramInfo
    from inl.spec.step import Bucket

GROUP_OF_V1 = "inl.v1"
"""Entry-point group of contract 1."""

LAST_OF_V1 = (1, 2)
"""The last version of contract 1, and that of its plugins without INL_CONTRACT."""


def adapted(backend: Backend) -> Backend:
    """Return a backend of contract 1 as one of contract 2: the same object.

    Its own kernels get it as an argument, so that it is not wrapped.
    """
    from inl.backend.programs import takes_info

    methods = vars(backend)
    if not takes_info(backend.compile):
        methods["compile"] = _without_info(backend.compile)
    methods["offers"] = _adapting(backend.offers)
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


def _adapting(offers: Callable[[type[Any]], Any]) -> Callable[[type[Any]], Any]:
    """Return an ``offers`` whose capabilities open adapted backends."""

    def offered(kind: type[Any]) -> Any:
        offer, name = offers(kind), _openers().get(kind)
        if offer is None or name is None:
            return offer
        opens = getattr(offer, name)
        return offer._replace(**{name: lambda value: adapted(opens(value))})

    return offered


def _openers() -> Mapping[type, str]:
    """Return the capabilities that open other backends, by the field that does so."""
    from inl.backend.base import Ranks, StorageDtypes
    from inl.placement.mesh import Meshes

    return {Ranks: "joining", StorageDtypes: "storing", Meshes: "over"}
