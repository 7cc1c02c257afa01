"""Mixture of experts: few slots read their matrices directly, many are sorted first.

A slot is a pair of a token and one of its experts. Launches depend on shapes only, so
there is no synchronization; programs determine their expert on the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inl.ops.moe import ExpertLinear, Experts
from inl.spec.kernel import Kernel
from inl.weights.packing import packer
from inl_torch.triton.common import PREFERENCE, power, refuse_dtype
from inl_torch.triton.matmul.activation import refuse_activation
from inl_torch.triton.moe.kernels import combine
from inl_torch.triton.moe.packed import pack_stack, refuse_stacks
from inl_torch.triton.moe.products import (
    sorted_product,
    unsorted_product,
    weighted_sum,
)
from inl_torch.triton.moe.sorting import sort_by_expert
from inl_torch.triton.quantized.packed import PACKED

MAX_UNSORTED_SLOTS = 32
"""Most slots that each read the matrix of their expert. They are also limited by the
number of experts, since otherwise most matrices would be read repeatedly."""

MAX_EXPERTS = 4096


def expert_linear(
    x: torch.Tensor, ids: torch.Tensor, w: ExpertLinear, *, is_part: bool = False
) -> torch.Tensor:
    """Compute the op, or as :attr:`~inl.spec.kernel.Kernel.run_part`."""
    slots = x.flatten(0, 1).contiguous()
    repeated = ids.numel() // slots.shape[0]
    ids = ids.contiguous()
    is_sorted = ids.numel() > min(MAX_UNSORTED_SLOTS, w.weight.shape[0])
    if not is_sorted:
        y = unsorted_product(slots, ids, w.weight, repeated=repeated, is_part=is_part)
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
    y = y.view(*ids.shape, -1)
    if is_part and is_sorted:
        y.masked_fill_(((ids < 0) | (ids >= w.weight.shape[0])).unsqueeze(-1), 0)
    return y


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: Experts,
    *,
    activation: str,
    is_part: bool = False,
) -> torch.Tensor:
    """Compute the op, or as :attr:`~inl.spec.kernel.Kernel.run_part`."""
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    (tokens, k), silu = ids.shape, activation == "silu"
    if ids.numel() <= min(MAX_UNSORTED_SLOTS, w.gate.shape[0]):
        inner = unsorted_product(
            x, ids, w.gate, w.up, repeated=k, silu=silu, is_part=is_part
        )
        return weighted_sum(inner, ids, weights, w.down, is_part=is_part)
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
    own = ids if is_part else None
    return _sum_of_slots(y.view(tokens, k, -1), weights, own, w.down.shape[0])


def combine_experts(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _sum_of_slots(y, weights)


def _sum_of_slots(
    y: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor | None = None,
    experts: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Sum the slots of each token by weight.

    ids: leave out slots of other ids than those of ``experts``, whose rows are not set.
    """
    (tokens, k, width), y = y.shape, y.contiguous()
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    block = min(power(width), 1024)
    combine[(tokens, -(-width // block))](
        y, weights.contiguous(), weights if ids is None else ids, out, k, width,
        BLOCK=block, EXPERTS=0 if ids is None else experts, num_warps=4,
    )  # fmt: skip
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
        "expert_linear",
        "triton",
        expert_linear,
        run_part=partial(expert_linear, is_part=True),
        refuse=_refuse,
        preference=PREFERENCE,
    ),
    Kernel(
        "experts",
        "triton",
        experts,
        run_part=partial(experts, is_part=True),
        refuse=_refuse,
        preference=PREFERENCE,
    ),
    Kernel(
        "combine_experts",
        "triton",
        combine_experts,
        refuse=_refuse_sum,
        preference=PREFERENCE,
    ),
)

PACKED_KERNELS = (
    Kernel(
        "expert_linear",
        "triton_packed",
        expert_linear,
        run_part=partial(expert_linear, is_part=True),
        refuse=_refuse,
        layout=PACKED,
        pack=packer("expert_linear", PACKED, pack_stack),
        can_pack=refuse_stacks,
        preference=PREFERENCE + 1,
    ),
    Kernel(
        "experts",
        "triton_packed",
        experts,
        run_part=partial(experts, is_part=True),
        refuse=_refuse,
        layout=PACKED,
        pack=packer("experts", PACKED, pack_stack),
        can_pack=refuse_stacks,
        preference=PREFERENCE + 1,
    ),
)
"""Kernels that read packed weights."""
