"""Functions that an array framework provides for :mod:`inl.functional`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inl.spec.kernel import Kernel

Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Functions:
    """INL ops on the arrays of one framework, differentiable where it supports that.

    Callers have validated the operands: ``x`` is an array of the framework, each other
    operand is an array of it or a number. Half-precision inputs are computed in
    float32. The new position has the dtype of ``x``; the new velocity has that of
    ``v``, or of ``x`` if ``v`` is a number.
    """

    inl_dynamics: Callable[..., Pair]
    """(x, v, mu, alpha, beta, gate, *, dt)."""
    inl_dynamics_step: Callable[..., Pair]
    """(x, v, mu, controller, *, dt, most_beta, limit)."""
    inl_dynamics_n_steps: Callable[..., Pair]
    """(x, v, mu, controller, *, n_steps, dt, most_beta, limit)."""
    to_numpy: Callable[[Any], Any]
    """Copies an array to the host. Raises RequestError if a gradient would be lost."""
    from_numpy: Callable[[Any, Any], Any]
    """(host array, like): copies to the dtype and device of the array ``like``. If
    ``like`` is ``None``, keeps the host array's dtype and uses the default device."""
    kernels: Callable[[], Iterable[Kernel]] | None = None
    """Lists kernels of other ops on these arrays, one per op, none of which refuses.
    ``None``: computed on the host."""
    is_traced: Callable[[Any], bool] | None = None
    """Whether an array's values cannot be read, as under ``jax.jit`` and
    ``torch.compile``; then only its shape is validated. ``None``: every array has
    values."""
    mark_whole: Callable[[Sequence[Callable[..., Any]]], None] | None = None
    """Make the framework's compiler, where it is imported, record calls of functions
    in its graph instead of tracing their code. Called often, with the same list.
    ``None``: the framework has no such compiler."""
    arrays: Any = None
    """Module with the names of :class:`inl.functional.arrays.ArrayModule`. ``None``:
    what ``__array_namespace__`` of an array returns."""
    block_sparse: Callable[..., Any] | None = None
    """(dense [..., K], values [B, b, b], :class:`~inl.spec.block_structure.\
BlockStructure`): the product [..., N], or ``None`` where it has no kernel for these
    arrays. ``None``: dense products of gathered blocks."""
    product: Callable[..., Any] | None = None
    """(a [..., M, K], b [K, N] or [..., K, N], inputs): the product of arrays rounded
    to the dtype ``inputs``, with sums in float32, in the dtype of ``a``; ``None`` where
    it has no kernel for these arrays. ``None``: plain products of rounded arrays."""
    attention: Callable[..., Any] | None = None
    """(queries [..., L, d], keys [..., S, d], values [..., S, e],
    :class:`~inl.spec.attention_pattern.AttentionPattern`, *, mask, scale, inputs,
    precision): their attention, in the dtype of the queries, without an array of all
    scores; heads of keys and values may broadcast. mask: as of
    :func:`inl.kernels.flash_attention`. scale: of scores. inputs: the half type that
    has all numbers of the arrays, or "". precision: of products, "high", "highest" or
    ``None``. ``None``: tile by tile, by the functions of ``arrays``."""
