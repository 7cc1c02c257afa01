"""Mixture of experts: few slots read their matrices directly, many are sorted first.

A slot is a pair of a token and one of its experts. Launches depend on shapes only, so
there is no synchronization; programs determine their expert on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from inl.ops.moe import ExpertLinear, Experts
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, power, refuse_dtype, spread
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.moe.kernels import (
    combine,
    slot_product,
    slots_weighted_sum,
    tile_product,
)

MAX_UNSORTED_SLOTS = 32
"""Most slots that each read the matrix of their expert. They are also limited by the
number of experts, since otherwise most matrices would be read repeatedly."""

MAX_EXPERTS = 4096


class SortedSlots(NamedTuple):
    """Slots sorted by expert."""

    order: torch.Tensor
    """[S] slot ids."""
    counts: torch.Tensor
    """[E] int32, slots per expert."""


def sort_by_expert(ids: torch.Tensor, experts: int) -> SortedSlots:
    """Sort the slots of ``ids`` [T, k] by expert."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    return SortedSlots(
        order, counts.scatter_add_(0, flat.long(), torch.ones_like(flat))
    )


def tile_slots(slots: int, experts: int) -> int:
    """Slots per tile: the average per expert, rounded up to a supported size."""
    return max(power(slots // experts), 16)


def unsorted_product(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    repeated: int,
    silu: bool = True,
) -> torch.Tensor:
    """Product of each slot with its expert's matrix: [S, N].

    other: a second matrix, for the gated product of both. x: [S / repeated, K], each
    row for ``repeated`` slots.
    """
    (_, n, k), slots = weight.shape, ids.numel()
    y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    rows, columns = _tile_shape(n, k, slots)
    slot_product[(-(-n // rows), slots)](
        x, ids, weight, weight if up is None else up, y, repeated, N=n, K=k,
        GATED=up is not None, SILU=silu, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y


def _tile_shape(n: int, k: int, slots: int) -> tuple[int, int]:
    rows = min(max(power(n * slots // 2048), 1), 4)
    return rows, min(max(power(k), 16), 512)


def sorted_product(
    x: torch.Tensor,
    slots_by_expert: SortedSlots,
    weight: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    repeated: int,
    gathers: bool,
    scatters: bool,
    silu: bool = True,
) -> torch.Tensor:
    """Like :func:`unsorted_product`, with the slots sorted by expert.

    gathers, scatters: whether rows of ``x`` and of the result are in the original
    order.
    """
    (experts, n, k), slots = weight.shape, slots_by_expert.order.shape[0]
    y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    is_float32 = x.dtype == torch.float32
    slots_per_tile = min(tile_slots(slots, experts), 32 if is_float32 else 128)
    # Each expert may have a partial tile; there are at most as many tiles as slots.
    tiles = min(slots, slots // slots_per_tile + experts)
    rows = 64 if up is not None or is_float32 else 128
    columns = min(max(power(k), 16), 32 if is_float32 else 64)
    tile_product[(tiles, -(-n // rows))](
        x, slots_by_expert.order, slots_by_expert.counts, weight,
        weight if up is None else up, y, repeated, EXPERTS=experts,
        EXPERTS_P=power(experts), N=n, K=k, GATED=up is not None, SILU=silu,
        GATHERS=gathers, SCATTERS=scatters, SLOTS=slots_per_tile,
        ROWS=min(rows, max(power(n), 16)), COLUMNS=columns,
        num_warps=spread(8 if slots_per_tile * rows >= 8192 else 4, x), num_stages=3,
    )  # fmt: skip
    return y


def expert_linear(x: torch.Tensor, ids: torch.Tensor, w: ExpertLinear) -> torch.Tensor:
    slots = x.flatten(0, 1).contiguous()
    repeated = ids.numel() // slots.shape[0]
    ids = ids.contiguous()
    if ids.numel() <= min(MAX_UNSORTED_SLOTS, w.weight.shape[0]):
        y = unsorted_product(slots, ids, w.weight, repeated=repeated)
    else:
        slots_by_expert = sort_by_expert(ids, w.weight.shape[0])
        y = sorted_product(
            slots,
            slots_by_expert,
            w.weight,
            repeated=repeated,
            gathers=True,
            scatters=True,
        )
    return y.view(*ids.shape, -1)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: Experts,
    *,
    activation: str,
) -> torch.Tensor:
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    (tokens, k), silu = ids.shape, activation == "silu"
    if ids.numel() <= min(MAX_UNSORTED_SLOTS, w.gate.shape[0]):
        inner = unsorted_product(x, ids, w.gate, w.up, repeated=k, silu=silu)
        return _weighted_sum(inner, ids, weights, w.down)
    slots_by_expert = sort_by_expert(ids, w.gate.shape[0])
    inner = sorted_product(
        x,
        slots_by_expert,
        w.gate,
        w.up,
        repeated=k,
        gathers=True,
        scatters=False,
        silu=silu,
    )
    y = sorted_product(
        inner, slots_by_expert, w.down, repeated=1, gathers=False, scatters=True
    )
    return combine_experts(y.view(tokens, k, -1), weights)


def _weighted_sum(
    inner: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    (tokens, k), (_, n, width) = ids.shape, down.shape
    y = torch.empty((tokens, n), dtype=inner.dtype, device=inner.device)
    rows, columns = _tile_shape(n, width, tokens)
    slots_weighted_sum[(-(-n // rows), tokens)](
        inner, ids, weights, down, y, k, N=n, K=width, ROWS=rows, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return y


def combine_experts(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    (tokens, k, width), y = y.shape, y.contiguous()
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    block = min(power(width), 1024)
    combine[(tokens, -(-width // block))](
        y, weights.contiguous(), out, k, width, BLOCK=block, num_warps=4
    )
    return out


def _refuse(x: Any, _ids: Any, *rest: Any, activation: str = "silu") -> str | None:
    count = rest[-1][0].shape[0]
    if count > MAX_EXPERTS:
        return f"takes {MAX_EXPERTS} experts at most, found {count}"
    return refuse_activation(activation) or refuse_dtype(x)


def _refuse_sum(y: Any, _weights: Any) -> str | None:
    return refuse_dtype(y)


KERNELS = (
    Kernel(
        "expert_linear", "triton", expert_linear, refuse=_refuse, preference=PREFERENCE
    ),
    Kernel("experts", "triton", experts, refuse=_refuse, preference=PREFERENCE),
    Kernel(
        "combine_experts",
        "triton",
        combine_experts,
        refuse=_refuse_sum,
        preference=PREFERENCE,
    ),
)
