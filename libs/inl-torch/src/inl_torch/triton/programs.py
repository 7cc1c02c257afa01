"""What the programs of a step share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait until the one before has ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
