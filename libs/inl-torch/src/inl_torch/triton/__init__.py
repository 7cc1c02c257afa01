"""Triton kernels, shared by the backends whose compiler Triton drives.

Half-precision tensors are computed on in float32, and float32 products are IEEE's, not
TF32. Nothing waits for the device, and every shape is static, so that a step of these
can be captured. Importing this package needs ``triton``.
"""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.kernel import Kernel
from inl_torch.triton import norm
from inl_torch.triton.attention import attention, cache, rope
from inl_torch.triton.dynamics import dynamics
from inl_torch.triton.matmul import activation, fused, linear, mlp
from inl_torch.triton.moe import experts
from inl_torch.triton.sampling import sample
from inl_torch.triton.step import (
    admit,
    embedding,
    make_step,
    prune_last_layer,
)
from inl_torch.triton.tuning import Tuning

FAMILIES = (
    activation, admit, attention, cache, dynamics, experts, norm, rope, prune_last_layer,
)  # fmt: skip
"""Modules whose kernels are one for all chips."""

TUNED = (embedding, fused, linear, mlp, rope, sample, make_step)
"""Modules whose kernels are cut for a chip."""


def kernels(tuning: Tuning | None = None) -> Iterable[Kernel]:
    """Every Triton kernel, for a backend of one rank."""
    for family in FAMILIES:
        yield from family.KERNELS
    for tuned in TUNED:
        yield from tuned.kernels(tuning or Tuning())
