"""Barrier of the threads of a program, after which one of them releases all stores."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip


@triton.jit
def finish_stores(WAITS: tl.constexpr) -> None:
    """Wait for the stores of all threads; one may then publish them with an atomic.

    WAITS: whether the chip is one of AMD's CDNA. There the barrier does not wait for
    stores to complete, since the threads of a program see each other's without that,
    and the release of one thread covers only its own.
    """
    if WAITS:  # noqa: SIM102
        if is_hip():
            tl.inline_asm_elementwise(
                "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip
    tl.debug_barrier()
