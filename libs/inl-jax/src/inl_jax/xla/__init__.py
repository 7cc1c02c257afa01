"""Kernels that XLA compiles: one for every primitive op, on every JAX platform."""

from __future__ import annotations

from inl.spec.kernel import Kernel
from inl_jax.xla import attention, inl, layers, moe, recurrent, sample, step, verify

KERNELS: tuple[Kernel, ...] = (
    *step.KERNELS,
    *layers.KERNELS,
    *attention.KERNELS,
    *moe.KERNELS,
    *inl.KERNELS,
    *recurrent.KERNELS,
    *sample.KERNELS,
    *verify.KERNELS,
)
