"""Kernels over ONNX graph values: one for every primitive op."""

from __future__ import annotations

from inl.backend.traced import bound
from inl.spec.kernel import Kernel
from inl_onnx import functions
from inl_onnx.kernels import attention, inl, kernel, layers, nbits, recurrent, ssm

KERNELS: tuple[Kernel, ...] = (
    *(kernel.kernel(run) for run in bound(functions)),
    *layers.KERNELS,
    *nbits.KERNELS,
    *attention.KERNELS,
    *inl.KERNELS,
    *recurrent.KERNELS,
    *ssm.KERNELS,
)
