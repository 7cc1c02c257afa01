"""Triton kernels, shared by the backends whose compiler Triton drives.

Half-precision tensors are computed on in float32, and float32 products are IEEE's, not
TF32. Nothing waits for the device, and every shape is static, so that a step of these
can be captured. Importing this package needs ``triton``.
"""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.kernel import Kernel
from inl_torch.triton import attention, cache, linear, mlp, norm, rope

FAMILIES = (attention, cache, linear, mlp, norm, rope)


def kernels() -> Iterable[Kernel]:
    """Every Triton kernel, for a backend of one rank."""
    for family in FAMILIES:
        yield from family.KERNELS
