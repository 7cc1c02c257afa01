"""Kernels that XLA compiles: one for every primitive op, on every JAX platform."""

from __future__ import annotations

from inl.backend.traced import bound
from inl.spec.kernel import Kernel
from inl_jax.xla import (
    attention,
    full_attention,
    functions,
    inl,
    kernel,
    layers,
    recurrent,
    sparse_attention,
    ssm,
)

KERNELS: tuple[Kernel, ...] = (
    *(kernel.kernel(run) for run in bound(functions)),
    *layers.KERNELS,
    *attention.KERNELS,
    *full_attention.KERNELS,
    *inl.KERNELS,
    *recurrent.KERNELS,
    *sparse_attention.KERNELS,
    *ssm.KERNELS,
)
