"""Ops on rows that are sorted by group: the parts of a mixture of experts.

``inl::dispatch_rows`` and ``inl::collect_rows`` are each other's derivatives, as are
``inl::grouped_linear`` and ``inl::grouped_outer``, so derivatives of every order exist.
Gradients are gathered, not added at indices: they are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch

from inl_torch.registered import group_products as products
from inl_torch.registered.batching import in_front
from inl_torch.registered.register import composable, register


def _dispatch(
    x: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,  # noqa: ARG001 - of the gradient
    k: int,
) -> torch.Tensor:
    """Return rows ``order // k`` of ``x`` [T, H]: [T * k, H].

    order: a permutation int64 [T * k] of the slots of tokens. inverse: its inverse.
    """
    return x.index_select(0, order // k)


def _collect(
    rows: torch.Tensor,
    order: torch.Tensor,  # noqa: ARG001 - of the gradient
    inverse: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Sum the ``k`` rows of each token: the transpose of ``dispatch_rows``.

    rows: [T * k, H]. Returns [T, H].
    """
    return rows.index_select(0, inverse).view(-1, k, rows.shape[1]).sum(1)


def _linear(
    rows: torch.Tensor, sizes: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Multiply each group of rows by the matrix of its expert.

    rows: [S, K]. sizes: int64 [G], rows of each group; their sum is S. weight: [E, N,
    K], or [E, K, N] if ``transposed``; group g takes matrix g mod E. Returns [S, N].
    """
    return products.linear(rows, sizes, weight, transposed)


def _outer(
    left: torch.Tensor, right: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Return ``left.T @ right`` of each group of rows.

    left: [S, N]. right: [S, K]. sizes: int64 [G]. Returns [G, N, K].
    """
    return products.outer(left, right, sizes)


def _save_order(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - passed by torch
    _, order, inverse, ctx.k = inputs
    ctx.save_for_backward(order, inverse)


def _dispatch_gradients(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return collect_rows(g, *ctx.saved_tensors, ctx.k), None, None, None


def _collect_gradients(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return dispatch_rows(g, *ctx.saved_tensors, ctx.k), None, None, None


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - passed by torch
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _linear_gradients(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    rows, sizes, weight = ctx.saved_tensors
    d_rows = d_weight = None
    if ctx.needs_input_grad[0]:
        d_rows = grouped_linear(g, sizes, weight, not ctx.transposed)
    if ctx.needs_input_grad[2]:
        pair = (rows, g) if ctx.transposed else (g, rows)
        each = grouped_outer(*pair, sizes)
        d_weight = each.unflatten(0, (-1, weight.shape[0])).sum(0)
    return d_rows, None, d_weight, None


def _save_outer(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - passed by torch
    ctx.save_for_backward(*inputs)


def _outer_gradients(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    left, right, sizes = ctx.saved_tensors
    needs_left, needs_right, _ = ctx.needs_input_grad
    d_left = grouped_linear(right, sizes, g, False) if needs_left else None
    d_right = grouped_linear(left, sizes, g, True) if needs_right else None
    return d_left, d_right, None


def _batched_rows(op: Any, info: Any, dims: Any, args: tuple[Any, ...]) -> Any:
    """Number the slots of all batches, and permute them in one call."""
    size, k = info.batch_size, args[3]
    x, order, inverse = _in_front(args[:3], dims, size)
    slots = order.shape[1]
    start = slots * torch.arange(size, device=order.device).unsqueeze(1)
    order, inverse = ((each + start).flatten() for each in (order, inverse))
    return op(x.flatten(0, 1), order, inverse, k).unflatten(0, (size, -1)), 0


def _batched_dispatch(info: Any, dims: Any, *args: Any) -> Any:
    return _batched_rows(dispatch_rows, info, dims, args)


def _batched_collect(info: Any, dims: Any, *args: Any) -> Any:
    return _batched_rows(collect_rows, info, dims, args)


def _batched_linear(info: Any, dims: Any, *args: Any) -> Any:
    """Multiply the groups of all batches in one call."""
    size, weight = info.batch_size, args[2]
    rows, sizes = _in_front(args[:2], dims, size)
    if dims[2] is not None:
        weight = weight.movedim(dims[2], 0)
        weight = weight.repeat(1, sizes.shape[1] // weight.shape[1], 1, 1).flatten(0, 1)
    y = grouped_linear(rows.flatten(0, 1), sizes.flatten(), weight, args[3])
    return y.unflatten(0, (size, -1)), 0


def _batched_outer(info: Any, dims: Any, *args: Any) -> Any:
    left, right, sizes = (
        each.flatten(0, 1) for each in _in_front(args, dims, info.batch_size)
    )
    return grouped_outer(left, right, sizes).unflatten(0, (info.batch_size, -1)), 0


def _in_front(tensors: Any, dims: Any, size: int) -> list[torch.Tensor]:
    pairs = zip(tensors, dims, strict=False)
    return [in_front(each, dim, size) for each, dim in pairs]


def _define(name: str, run: Any, fake: Any, **rules: Any) -> Any:
    return composable(register(f"inl::{name}", run, fake=fake, **rules), **rules)


dispatch_rows = _define(
    "dispatch_rows",
    _dispatch,
    lambda x, order, *_: x.new_empty(order.shape[0], x.shape[1]),
    save=_save_order,
    gradients=_dispatch_gradients,
    batched=_batched_dispatch,
)
collect_rows = _define(
    "collect_rows",
    _collect,
    lambda rows, order, _, k: rows.new_empty(order.shape[0] // k, rows.shape[1]),
    save=_save_order,
    gradients=_collect_gradients,
    batched=_batched_collect,
)
grouped_linear = _define(
    "grouped_linear",
    _linear,
    lambda rows, _, w, transposed: rows.new_empty(
        rows.shape[0], w.shape[2 if transposed else 1]
    ),
    save=_save_linear,
    gradients=_linear_gradients,
    batched=_batched_linear,
)
grouped_outer = _define(
    "grouped_outer",
    _outer,
    lambda left, right, sizes: left.new_empty(
        sizes.shape[0], left.shape[1], right.shape[1]
    ),
    save=_save_outer,
    gradients=_outer_gradients,
    batched=_batched_outer,
)
