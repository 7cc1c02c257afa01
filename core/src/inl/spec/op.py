"""What an op is: a name, a body that is its specification, and its tolerance rule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import SIZES
from inl.errors import PluginError
from inl.spec.tree import leaves

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype name of a tensor that need not exist."""

    shape: tuple[int, ...]
    dtype: str


class Cost(NamedTuple):
    """What computing an op once takes at least."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Case:
    """Named inputs of an op, shared by conformance, tuning and benchmarks.

    Floating arguments are float64; whoever uses a case rounds them to the storage
    dtype first.
    """

    name: str
    args: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


Shapes = Callable[..., Any]
Cases = Callable[["np.random.Generator"], Iterable[Case]]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One op of the catalog.

    ``body`` of a primitive op takes NumPy arrays and keeps their precision (float64
    is the truth); of a composite, its first parameter is ``ops`` and it is written
    over other ops. ``shapes`` maps argument specs to result specs.
    """

    name: str
    body: Callable[..., Any]
    shapes: Shapes | None
    cases: Cases
    weights: type | None
    """Group of parameters that argument ``w`` holds; constant after loading."""
    consumes: tuple[str, ...]
    """Arguments whose buffers the op takes over: they must not be used again."""
    rounds: bool
    """Whether floating results are stored in the compute dtype; else float32."""
    tolerance: float
    """Factor on the error of the body run with storage rounding (seam: 2)."""
    cost: Callable[..., Cost]
    parameters: tuple[str, ...]
    """Names of the tensor parameters, in order."""
    layout_opaque: bool = False
    """Whether a composite's body hands ``w`` on unopened: any layout will do."""
    reduces: str = ""
    """Argument that a composite's body sums over the ranks before anything else; a
    kernel is given the sum."""

    @property
    def composite(self) -> bool:
        """Whether the body is written over other ops."""
        return self.shapes is None


CATALOG: dict[str, OpSpec] = {}
"""Every op that was defined, by name. Filled by importing :mod:`inl.ops`."""


def op(
    *,
    shapes: Shapes | None = None,
    cases: Cases,
    weights: type | None = None,
    consumes: tuple[str, ...] = (),
    rounds: bool = True,
    tolerance: float = 2.0,
    flops: Callable[..., int] | None = None,
    layout_opaque: bool = False,
    reduces: str = "",
) -> Callable[[Callable[..., Any]], OpSpec]:
    """Define an op from its body; keyword-only parameters are its attributes.

    Raises :class:`PluginError` where the name is taken or a primitive has no shapes.
    """

    def define(body: Callable[..., Any]) -> OpSpec:
        name = body.__name__
        kinds = inspect.signature(body).parameters.values()
        positional = tuple(p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD)
        composite = positional[:1] == ("ops",)
        if composite == (shapes is not None):
            raise PluginError(f"op {name}: a primitive has shapes and a composite none")
        if name in CATALOG:
            raise PluginError(f"op {name}: defined twice; choose another name")
        tensors = positional[1:] if composite else positional
        spec = OpSpec(
            name, body, shapes, cases, weights, consumes, rounds, tolerance,
            _cost(flops), tensors, layout_opaque, reduces,
        )  # fmt: skip
        CATALOG[name] = spec
        return spec

    return define


def nbytes(tree: Any) -> int:
    """Bytes of every tensor or :class:`Spec` in a tree."""
    return sum(SIZES[str(leaf.dtype)] * math.prod(leaf.shape) for leaf in leaves(tree))


def _cost(flops: Callable[..., int] | None) -> Callable[..., Cost]:
    def cost(results: Any, *specs: Any, **attrs: Any) -> Cost:
        moved = nbytes(specs) + nbytes(results)
        count = flops(*specs, **attrs) if flops else 0
        return Cost(count, moved)

    return cost
