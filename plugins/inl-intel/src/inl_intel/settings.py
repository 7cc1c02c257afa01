"""Environment variables of the XPU backend."""

from __future__ import annotations

import os
from typing import Final

from inl.errors import DeviceError

KERNELS: Final = "INL_XPU_KERNELS"
"""Environment variable: which kernels are used."""

ACCEPTED: Final = ("triton", "torch")


def requested_kernels() -> str:
    """Read ``INL_XPU_KERNELS``: "triton" (the default), or "torch" for torch's alone.

    Raises :class:`DeviceError` for any other value.
    """
    value = os.environ.get(KERNELS, "") or "triton"
    if value not in ACCEPTED:
        raise DeviceError(
            f"environment variable {KERNELS}: found {value!r:.80}, "
            f"accepted: {', '.join(ACCEPTED)}"
        )
    return value
