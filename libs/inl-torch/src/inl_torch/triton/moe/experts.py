"""Mixture of experts: a few slots read their matrices, many are sorted first.

Nothing waits for the device: the launches follow from the shapes, and the programs find
out on it which expert's rows are theirs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from inl.ops.moe import ExpertLinear, Experts
from inl.spec.kernel import Kernel
from inl_torch.triton.common import PREFERENCE, power, refuse_dtype
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.moe.kernels import combine, slot_product, slots_sum, tile_product

FEW = 32
"""Slots, of all tokens, that each read the matrix of their expert; no more of them than
there are experts, or most matrices would be read again and again."""

MOST_EXPERTS = 4096


class Sorted(NamedTuple):
    """Slots by expert."""

    order: torch.Tensor
    """[S] slots."""
    counts: torch.Tensor
    """[E] int32."""


def sort(ids: torch.Tensor, experts: int) -> Sorted:
    """The slots of ``ids`` [T, k] with those of one expert beside each other."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    return Sorted(order, counts.scatter_add_(0, flat.long(), torch.ones_like(flat)))


def slots_at_once(slots: int, experts: int) -> int:
    """Slots of a tile: as many as an expert has on average, or the next size."""
    return max(power(slots // experts), 16)


def few(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    other: torch.Tensor | None = None,
    *,
    repeated: int,
    silu: bool = True,
) -> torch.Tensor:
    """Each slot's own product [S, N]; of two matrices, gated, where there is another.

    x: [slots of its own, K], each for ``repeated`` slots.
    """
    (_, n, k), slots = weight.shape, ids.numel()
    y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    rows, columns = _cut(n, k, slots)
    slot_product[(-(-n // rows), slots)](
        x, ids, weight, weight if other is None else other, y, repeated, N=n, K=k,
        GATED=other is not None, SILU=silu, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y


def _cut(n: int, k: int, slots: int) -> tuple[int, int]:
    rows = min(max(power(n * slots // 2048), 1), 4)
    return rows, min(max(power(k), 16), 512)


def many(
    x: torch.Tensor,
    found: Sorted,
    weight: torch.Tensor,
    other: torch.Tensor | None = None,
    *,
    repeated: int,
    gathers: bool,
    scatters: bool,
    silu: bool = True,
) -> torch.Tensor:
    """As :func:`few`; rows are sorted that are neither gathered nor scattered."""
    (experts, n, k), slots = weight.shape, found.order.shape[0]
    y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
    wide = x.dtype == torch.float32
    at_once = min(slots_at_once(slots, experts), 32 if wide else 128)
    # Every expert may leave a tile unfilled, but not more than there are slots.
    tiles = min(slots, slots // at_once + experts)
    rows = 64 if other is not None or wide else 128
    columns = min(max(power(k), 16), 32 if wide else 64)
    tile_product[(tiles, -(-n // rows))](
        x, found.order, found.counts, weight, weight if other is None else other, y,
        repeated, EXPERTS=experts, EXPERTS_P=power(experts), N=n, K=k,
        GATED=other is not None, SILU=silu, GATHERS=gathers, SCATTERS=scatters,
        SLOTS=at_once, ROWS=min(rows, max(power(n), 16)),
        COLUMNS=columns, num_warps=8 if at_once * rows >= 8192 else 4, num_stages=3,
    )  # fmt: skip
    return y


def expert_linear(x: torch.Tensor, ids: torch.Tensor, w: ExpertLinear) -> torch.Tensor:
    slots = x.flatten(0, 1).contiguous()
    repeated = ids.numel() // slots.shape[0]
    ids = ids.contiguous()
    if ids.numel() <= min(FEW, w.weight.shape[0]):
        y = few(slots, ids, w.weight, repeated=repeated)
    else:
        found = sort(ids, w.weight.shape[0])
        y = many(slots, found, w.weight, repeated=repeated, gathers=True, scatters=True)
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
    if ids.numel() <= min(FEW, w.gate.shape[0]):
        inner = few(x, ids, w.gate, w.up, repeated=k, silu=silu)
        return _summed(inner, ids, weights, w.down)
    found = sort(ids, w.gate.shape[0])
    inner = many(
        x, found, w.gate, w.up, repeated=k, gathers=True, scatters=False, silu=silu
    )
    y = many(inner, found, w.down, repeated=1, gathers=False, scatters=True)
    return combine_experts(y.view(tokens, k, -1), weights)


def _summed(
    inner: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    (tokens, k), (_, n, width) = ids.shape, down.shape
    y = torch.empty((tokens, n), dtype=inner.dtype, device=inner.device)
    rows, columns = _cut(n, width, tokens)
    slots_sum[(-(-n // rows), tokens)](
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
    if count > MOST_EXPERTS:
        return f"takes {MOST_EXPERTS} experts at most, found {count}"
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
