"""Experts divided over the devices of a mesh's expert axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp

from inl.ops.moe import ExpertLinear
from inl.spec.kernel import Kernel
from inl_jax.tensors import Array

Run = Callable[[Array, Array, ExpertLinear], Array]


def with_part(kernel: Kernel) -> Kernel:
    """Return a kernel of ``expert_linear`` that also computes a part of the experts."""
    return replace(kernel, run_part=_of_own(kernel.run))


def _of_own(run: Run) -> Run:
    def run_part(x: Array, ids: Array, w: ExpertLinear) -> Array:
        own = (ids >= 0) & (ids < w.weight.shape[0])
        # Slots of other devices compute some expert, and are left out.
        return jnp.where(own[:, :, None], run(x, jnp.where(own, ids, 0), w), 0)

    return run_part
