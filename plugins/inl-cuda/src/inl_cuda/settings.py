"""What environment variables ask of the backend."""

from __future__ import annotations

import os
from typing import Final

from inl.errors import DeviceError

WEIGHTS: Final = "INL_CUDA_WEIGHTS"
"""Environment variable: how weights that a file packs lie in the device's memory."""

ACCEPTED: Final = ("dense", "packed")


def weights_asked_for() -> str:
    """Read INL_CUDA_WEIGHTS; raises :class:`DeviceError` for what it does not accept.

    "packed" keeps the blocks of quantized files, which takes less memory; "dense" has
    them decoded to the dtype computed in.
    """
    found = os.environ.get(WEIGHTS, "") or "dense"
    if found not in ACCEPTED:
        raise DeviceError(
            f"environment variable {WEIGHTS}: found {found!r:.80}, "
            f"accepted: {', '.join(ACCEPTED)}"
        )
    return found
