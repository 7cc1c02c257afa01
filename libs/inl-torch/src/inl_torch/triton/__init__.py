"""Triton kernels, shared by the GPU backends.

Half-precision inputs are computed in float32, and float32 products use IEEE arithmetic,
not TF32. Kernels do not synchronize and have static shapes, so that a step can be
captured as a graph. Importing this package requires ``triton``.
"""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.kernel import Kernel
from inl_torch.triton import norm
from inl_torch.triton.attention import (
    attention,
    cache,
    rope,
    rope_attend,
    sequences,
    wide_heads,
)
from inl_torch.triton.dynamics import dynamics
from inl_torch.triton.indexed import indexed
from inl_torch.triton.lora import lora
from inl_torch.triton.lora import streamed as adapted
from inl_torch.triton.matmul import activation, fused, invariant, linear, mlp
from inl_torch.triton.moe import experts, routing
from inl_torch.triton.recurrent import recurrent, ssm
from inl_torch.triton.sampling import sample, score
from inl_torch.triton.step import (
    admit,
    embedding,
    make_step,
    prune_last_layer,
    verify,
)
from inl_torch.triton.tuning import Tuning

FAMILIES = (
    activation, admit, cache, dynamics, experts, indexed, invariant, norm, rope,
    prune_last_layer, recurrent, routing, ssm,
)  # fmt: skip
"""Modules whose kernels have no launch parameters that depend on the chip."""

TUNED = (
    adapted, attention, embedding, fused, linear, lora, make_step, mlp, norm, rope,
    rope_attend, sample, score, sequences, verify, wide_heads,
)  # fmt: skip
"""Modules whose kernels have launch parameters that depend on the chip."""


def kernels(tuning: Tuning | None = None) -> Iterable[Kernel]:
    """Return all Triton kernels, with the launch parameters of ``tuning``."""
    for family in FAMILIES:
        yield from family.KERNELS
    for tuned in TUNED:
        yield from tuned.kernels(tuning or Tuning())
