"""Launches of products with the matrices of experts, packed or not."""

from __future__ import annotations

from typing import Any

import torch

from inl_torch.triton.common import power, spread
from inl_torch.triton.moe.kernels import (
    slot_product,
    slots_weighted_sum,
    tile_product,
)
from inl_torch.triton.moe.packed import ExpertStack
from inl_torch.triton.moe.packed_kernels import packed_slots, packed_tile
from inl_torch.triton.moe.sorting import SortedSlots, tile_slots

Matrices = torch.Tensor | ExpertStack
"""[E, N, K]."""


def plain(weight: Any) -> Any:
    """Return the tensor of matrices that are not packed; others as they are."""
    is_dense = isinstance(weight, ExpertStack) and weight.scales is None
    return weight.codes if is_dense else weight


def unsorted_product(
    x: torch.Tensor,
    ids: torch.Tensor,
    matrices: Matrices,
    gated_by: Matrices | None = None,
    *,
    repeated: int,
    silu: bool = True,
    is_part: bool = False,
) -> torch.Tensor:
    """Product of each slot with its expert's matrix: [S, N].

    gated_by: further matrices, for the gated product of both. x: [S / repeated, K],
    each row for ``repeated`` slots. is_part: whether ids may be of no matrix here,
    whose slots have zeros.
    """
    weight, up = plain(matrices), plain(gated_by)
    if isinstance(weight, ExpertStack):
        return _packed_slots(
            x, ids, None, weight, up, repeated=repeated, summed=1, silu=silu,
            is_part=is_part,
        )  # fmt: skip
    (count, n, k), slots = weight.shape, ids.numel()
    y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    rows, columns = _tile_shape(n, k, slots)
    slot_product[(-(-n // rows), slots)](
        x, ids, weight, weight if up is None else up, y, repeated, N=n, K=k,
        GATED=up is not None, SILU=silu, ROWS=rows, COLUMNS=columns,
        EXPERTS=count * is_part, num_warps=4,
    )  # fmt: skip
    return y


def _tile_shape(n: int, k: int, slots: int) -> tuple[int, int]:
    rows = min(max(power(n * slots // 2048), 1), 4)
    return rows, min(max(power(k), 16), 512)


def sorted_product(
    x: torch.Tensor,
    slots_by_expert: SortedSlots,
    matrices: Matrices,
    gated_by: Matrices | None = None,
    *,
    repeated: int,
    gathers: bool,
    scatters: bool,
    silu: bool = True,
) -> torch.Tensor:
    """Like :func:`unsorted_product`, with the slots sorted by expert.

    gathers, scatters: whether rows of ``x`` and of the result are in the original
    order. Rows of slots that are in no place of the order are not set.
    """
    weight, up = plain(matrices), plain(gated_by)
    (experts, n, k), slots = weight.shape, slots_by_expert.order.shape[0]
    y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    is_float32 = x.dtype == torch.float32
    slots_per_tile = min(tile_slots(slots, experts), 32 if is_float32 else 128)
    # Each expert may have a partial tile; there are at most as many tiles as slots.
    tiles = min(slots, slots // slots_per_tile + experts)
    rows = 64 if up is not None or is_float32 else 128
    if is_float32 and isinstance(up, ExpertStack):
        rows = 32
    rows = min(rows, max(power(n), 16))
    constants = {
        "EXPERTS": experts, "EXPERTS_P": power(experts), "N": n,
        "GATED": up is not None, "SILU": silu, "GATHERS": gathers,
        "SCATTERS": scatters, "SLOTS": slots_per_tile, "ROWS": rows,
        "num_warps": spread(8 if slots_per_tile * rows >= 8192 else 4, x),
    }  # fmt: skip
    grid = tiles, -(-n // rows)
    if isinstance(weight, ExpertStack):
        packed_tile[grid](
            x, *slots_by_expert, *weight.tensors(), *(up or weight).tensors(), y,
            repeated, UNITS=_tile_units(weight, x.dtype), num_stages=2,
            **weight.constants(), **constants,
        )  # fmt: skip
        return y
    columns = min(max(power(k), 16), 32 if is_float32 else 64)
    tile_product[grid](
        x, *slots_by_expert, weight, weight if up is None else up, y, repeated, K=k,
        COLUMNS=columns, num_stages=3, **constants,
    )  # fmt: skip
    return y


def _tile_units(weight: ExpertStack, dtype: torch.dtype) -> int:
    """Return the units of a row per tile: 64 weights, or what float32 has registers
    for.
    """
    return 1 if dtype == torch.float32 else weight.bits // 2


def weighted_sum(
    inner: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: Matrices,
    *,
    is_part: bool = False,
) -> torch.Tensor:
    """Sum of the products of a token's slots, weighted: [T, N].

    inner: [T * k, K]. ids, weights: [T, k]. is_part: as for :func:`unsorted_product`.
    """
    (tokens, k), down = ids.shape, plain(matrices)
    if isinstance(down, ExpertStack):
        return _packed_slots(
            inner, ids, weights, down, repeated=1, summed=k, is_part=is_part
        )
    count, n, width = down.shape
    y = torch.empty((tokens, n), dtype=inner.dtype, device=inner.device)
    rows, columns = _tile_shape(n, width, tokens)
    slots_weighted_sum[(-(-n // rows), tokens)](
        inner, ids, weights, down, y, k, N=n, K=width, ROWS=rows, COLUMNS=columns,
        EXPERTS=count * is_part, num_warps=4,
    )  # fmt: skip
    return y


def _packed_slots(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor | None,
    weight: ExpertStack,
    up: ExpertStack | None = None,
    *,
    repeated: int,
    summed: int,
    silu: bool = True,
    is_part: bool = False,
) -> torch.Tensor:
    """Sums of ``summed`` consecutive slots, times ``shares`` if there are any."""
    n, outputs = weight.shape[1], ids.numel() // summed
    y = torch.empty((outputs, n), dtype=x.dtype, device=x.device)
    constants = weight.constants()
    units = min(power(constants["ROW_UNITS"] * summed), 64)
    rows = min(max(power(n * outputs // 2048), 2), 4)
    packed_slots[(-(-n // rows), outputs)](
        x, ids, ids if shares is None else shares, *weight.tensors(),
        *(up or weight).tensors(), y, repeated, N=n, SUMMED=summed,
        WEIGHTED=shares is not None, GATED=up is not None, SILU=silu, ROWS=rows,
        UNITS=units, EXPERTS=weight.shape[0] * is_part, num_warps=4, **constants,
    )  # fmt: skip
    return y
