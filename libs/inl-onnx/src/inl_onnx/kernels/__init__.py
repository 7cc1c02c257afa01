"""Kernels over ONNX graph values: one for every primitive op."""

from __future__ import annotations

from inl.spec.kernel import Kernel
from inl_onnx.kernels import (
    attention,
    inl,
    layers,
    moe,
    nbits,
    recurrent,
    sample,
    step,
    verify,
)

KERNELS: tuple[Kernel, ...] = (
    *step.KERNELS,
    *layers.KERNELS,
    *nbits.KERNELS,
    *attention.KERNELS,
    *moe.KERNELS,
    *inl.KERNELS,
    *recurrent.KERNELS,
    *sample.KERNELS,
    *verify.KERNELS,
)
