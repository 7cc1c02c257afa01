"""Kernels that must be reported: one spills registers, others cannot be compiled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def spilling(x, y, SIZE: tl.constexpr):
    """Keeps more values than there are registers."""
    at = tl.arange(0, SIZE)
    kept = tl.load(x + at)
    largest = tl.max(kept, 0)
    kept = tl.exp(kept - largest)
    tl.store(y + at, kept / tl.sum(kept, 0))


@triton.jit
def doubling(x, y):
    """Computes in float64, which Arc GPUs lack."""
    tl.store(y, (tl.load(x).to(tl.float64) * 1.1).to(tl.float32))


@triton.jit
def foreign(x, y):
    """Uses an operation that this Triton has no lowering for."""
    tl.store(y, tl.no_such_operation(tl.load(x)))


def call(kernel, size, **options):
    x = torch.ones(size)
    kernel[(1,)](x, x, **options)


PLANTED = {
    "spill": lambda: call(spilling, 16384, SIZE=16384, num_warps=1),
    "float64": lambda: call(doubling, 1),
    "operation": lambda: call(foreign, 1),
}
