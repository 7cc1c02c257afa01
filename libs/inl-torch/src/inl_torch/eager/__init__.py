"""Kernels of plain torch calls, on any device that torch drives, torch 2.4 or newer.

Half-precision tensors are computed on in float32. State is consumed by writing into
it. Nothing here waits for the device nor has a shape that depends on data, except
that ``attention`` reads sizes on the CPU, where there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.kernel import Kernel
from inl_torch.eager import (
    attention,
    cache,
    collective,
    embedding,
    inl,
    linear,
    mlp,
    moe,
    norm,
    rope,
    routed,
    sample,
    slots,
    step,
)

FAMILIES = (
    attention,
    cache,
    collective,
    embedding,
    inl,
    linear,
    mlp,
    moe,
    norm,
    rope,
    routed,
    sample,
    slots,
    step,
)


def kernels() -> Iterable[Kernel]:
    """Every eager kernel."""
    for family in FAMILIES:
        yield from family.KERNELS
