"""Programmatic dependent launch (PDL) of the kernels of a step."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    # A build of Triton for other chips, where PDL is never used.
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def pdl_sync(PDL: tl.constexpr) -> None:
    """Wait for the previous kernel to end, then allow the next one to start.

    Code before this call may read the outputs of all earlier kernels of the step except
    the previous one: when a kernel starts, the kernel before the previous has ended.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def pdl_start_next(PDL: tl.constexpr) -> None:
    """Allow the next kernel to start, before this one has waited.

    Nothing before the next kernel's wait may read what the previous kernel writes.
    """
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr) -> None:
    """Wait for the previous kernel to end; the next one waits for this call too."""
    if PDL:
        gdc_wait()
