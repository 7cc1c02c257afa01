"""Op definitions: the NumPy body that specifies an op, its shapes, cases and cost."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import SIZES
from inl.errors import PluginError
from inl.spec.tree import leaves

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype name of a tensor, without data."""

    shape: tuple[int, ...]
    dtype: str


class Cost(NamedTuple):
    """Least work of one call of an op, whatever kernel computes it."""

    flops: int
    """Arithmetic operations; a multiply-add is 2. 0 where an op does not count them:
    bookkeeping and sampling."""
    bytes: int
    """Bytes read from and written to device memory, each operand once."""


@dataclass(frozen=True, slots=True)
class Case:
    """Named inputs of an op, shared by conformance tests, tuning and benchmarks.

    Floating-point arguments are float64; round them to the storage dtype before use.
    """

    name: str
    args: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    since: tuple[int, int] = (1, 0)
    """Contract that first specified the result."""


Shapes = Callable[..., Any]
Cases = Callable[..., Iterable[Case]]
"""(random generator) -> cases; cases of other sizes if they are given too."""
Sizes = Sequence[tuple[int, ...]]
"""Sizes of the cases of an op, in an order of its own."""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One op of the catalog.

    ``body`` of a primitive op takes NumPy arrays and keeps their precision; in float64
    its result is the reference. ``body`` of a composite op takes ``ops`` as its first
    parameter and calls other ops. ``shapes`` maps argument specs to result specs.
    """

    name: str
    body: Callable[..., Any]
    shapes: Shapes | None
    cases: Cases
    weights: type | None
    """Type of argument ``w``, a group of parameters that is constant after loading."""
    consumes: tuple[str, ...]
    """Arguments whose buffers the op may overwrite; the caller must not reuse them."""
    rounds: bool
    """Whether floating-point results have the compute dtype; otherwise float32."""
    tolerance: float
    """Allowed error, as a factor on the error of the body with storage rounding."""
    cost: Callable[..., Cost]
    """(results, *arguments, **attributes), all with shapes and dtypes -> cost."""
    parameters: tuple[str, ...]
    """Names of the tensor parameters, in order."""
    layout_opaque: bool = False
    """Whether a composite's body passes ``w`` to another op without reading its
    fields, so that any layout is accepted."""
    reduces: str = ""
    """Argument that a composite's body sums over the ranks before anything else. A
    kernel receives the sum."""
    overwrites: tuple[str, ...] = ()
    """Arguments beside ``consumes`` whose memory a kernel may use for its result. No
    kernel changes any other argument."""
    since: tuple[int, int] = (1, 0)
    """Contract that first had the op. One of contract 2.1 or later is a composite, so
    that every backend computes it, or has a ``used_by``."""
    used_by: str = ""
    """What calls the op, if few programs do and a backend may leave it out; empty for
    an op of language models in general."""
    dtypes: tuple[str, ...] = ()
    """Storage dtypes whose range a composite's body needs; empty for every one. Others
    take a kernel for the op itself."""

    @property
    def composite(self) -> bool:
        """Whether the body calls other ops."""
        return self.shapes is None


CATALOG: dict[str, OpSpec] = {}
"""Every defined op by name. Filled by importing :mod:`inl.ops`."""


def op(
    *,
    shapes: Shapes | None = None,
    cases: Cases,
    weights: type | None = None,
    consumes: tuple[str, ...] = (),
    rounds: bool = True,
    tolerance: float = 2.0,
    flops: Callable[..., int] | None = None,
    traffic: Callable[..., int] | None = None,
    layout_opaque: bool = False,
    reduces: str = "",
    overwrites: tuple[str, ...] = (),
    since: tuple[int, int] = (1, 0),
    used_by: str = "",
    dtypes: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], OpSpec]:
    """Define an op from its body; keyword-only parameters are its attributes.

    flops: (*arguments, **attributes) -> arithmetic operations; 0 by default.
    traffic: (results, *arguments, **attributes) -> bytes of device memory read and
    written; by default every argument once and every result once. Required in effect
    for an op that reads a part of an argument, such as rows of a table.
    The other parameters are the fields of :class:`OpSpec`.

    Raises :class:`PluginError` if the name is taken, if a primitive has no ``shapes``
    or if a composite has them.
    """

    def define(body: Callable[..., Any]) -> OpSpec:
        name = body.__name__
        kinds = inspect.signature(body).parameters.values()
        positional = tuple(p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD)
        composite = positional[:1] == ("ops",)
        if composite == (shapes is not None):
            raise PluginError(
                f"op {name}: a primitive needs shapes and a composite takes none"
            )
        if name in CATALOG:
            raise PluginError(f"op {name}: already defined; choose another name")
        tensors = positional[1:] if composite else positional
        spec = OpSpec(
            name, body, shapes, cases, weights, consumes, rounds, tolerance,
            _cost(flops, traffic), tensors, layout_opaque, reduces, overwrites,
            since, used_by, dtypes,
        )  # fmt: skip
        CATALOG[name] = spec
        return spec

    return define


def elements(x: Any) -> int:
    """Number of elements of a tensor or :class:`Spec`."""
    return int(math.prod(x.shape))


def nbytes(tree: Any) -> int:
    """Logical bytes of every tensor or :class:`Spec` in a tree."""
    return sum(SIZES[str(leaf.dtype)] * elements(leaf) for leaf in leaves(tree))


def stored_nbytes(tree: Any) -> int:
    """Bytes of a tree of specs, packed weights at their stored size if it is known.

    A :class:`~inl.spec.strict_array.StrictArray` of packed weights may have a
    ``stored_bytes``; every other leaf counts its logical size.
    """
    return sum(
        nbytes(leaf) if (size := getattr(leaf, "stored_bytes", None)) is None else size
        for leaf in leaves(tree)
    )


def _cost(
    flops: Callable[..., int] | None, traffic: Callable[..., int] | None
) -> Callable[..., Cost]:
    def cost(results: Any, *specs: Any, **attrs: Any) -> Cost:
        if traffic:
            moved = traffic(results, *specs, **attrs)
        else:
            moved = stored_nbytes(specs) + stored_nbytes(results)
        return Cost(flops(*specs, **attrs) if flops else 0, moved)

    return cost
