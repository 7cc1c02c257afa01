"""Kernels of the native library, and NumPy for what it does not compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl_cpu.kernels import attention, dense, fallback, norm, rope, rows, sample, step

if TYPE_CHECKING:
    from inl_cpu.command_emitter import Stage

FAMILIES = (attention, dense, norm, rope, rows, sample, step)


def kernels(stage: Stage) -> Iterable[Kernel]:
    """Every kernel, bound to where a backend runs or records them."""
    found = [kernel for family in FAMILIES for kernel in family.kernels(stage)]
    yield from found
    for spec in catalog().values():
        if not spec.composite:
            yield fallback.body_kernel(stage, spec)
