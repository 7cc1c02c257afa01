"""Kernels of the native library, with NumPy for the remaining ops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl_cpu.kernels import (
    attention,
    dense,
    experts,
    fallback,
    full_attention,
    lora,
    norm,
    recurrent,
    rope,
    rows,
    sample,
    sparse_attention,
    step,
)

if TYPE_CHECKING:
    from inl_cpu.command_emitter import CommandEmitter

FAMILIES = (
    attention, dense, experts, full_attention, lora, norm, recurrent, rope, rows,
    sample, sparse_attention, step,
)  # fmt: skip


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Every kernel, bound to the emitter of a backend."""
    for family in FAMILIES:
        yield from family.kernels(emitter)
    for spec in catalog().values():
        # Bodies do not read the layout of the backend's caches.
        if not spec.composite and "cache" not in spec.parameters:
            yield fallback.body_kernel(emitter, spec)
