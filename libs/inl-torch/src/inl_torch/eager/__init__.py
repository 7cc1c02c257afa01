"""Kernels of plain torch calls for any torch device, with torch 2.5 or newer.

Half-precision inputs are computed in float32. State is updated in place. No kernel
synchronizes with the device or has data-dependent shapes, except that ``attention``,
recurrent layers and the experts read sizes on the CPU, where no synchronization is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.kernel import Kernel
from inl_torch.eager import (
    attention,
    cache,
    collective,
    embedding,
    full_attention,
    heads,
    inl,
    linear,
    mlp,
    moe,
    norm,
    pool,
    recurrent,
    rope,
    routed,
    sample,
    slots,
    span_attention,
    sparse_attention,
    ssm,
    step,
    verify,
)

FAMILIES = (
    attention,
    cache,
    collective,
    embedding,
    full_attention,
    heads,
    inl,
    linear,
    mlp,
    moe,
    norm,
    pool,
    recurrent,
    rope,
    routed,
    sample,
    slots,
    span_attention,
    sparse_attention,
    ssm,
    step,
    verify,
)


def kernels() -> Iterable[Kernel]:
    """Every eager kernel."""
    for family in FAMILIES:
        yield from family.KERNELS
