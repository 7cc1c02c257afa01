"""What the programs of a step share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(EARLY: tl.constexpr) -> None:
    """Wait until the kernel before has ended, and only then let the next one start.

    So what runs ahead of this call may read all that the step's kernels wrote but the
    one before: when a kernel starts, the one before that has ended.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
