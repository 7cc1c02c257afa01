"""Environment variables of the CUDA backend."""

from __future__ import annotations

import os
from typing import Final

from inl.errors import DeviceError

WEIGHTS: Final = "INL_CUDA_WEIGHTS"
"""Environment variable: how quantized weights of a file are stored on the device."""

ACCEPTED: Final = ("dense", "packed")


def requested_weights() -> str:
    """Read ``INL_CUDA_WEIGHTS``: "dense", "packed", or "" if it is not set.

    "dense" dequantizes weights to the compute dtype; "packed" stores the file's blocks,
    which takes less memory. By default, files are dequantized, and weights that are
    quantized while they are loaded are not. Raises :class:`DeviceError` for any other
    value.
    """
    value = os.environ.get(WEIGHTS, "")
    if not value:
        return ""
    if value not in ACCEPTED:
        raise DeviceError(
            f"environment variable {WEIGHTS}: found {value!r:.80}, "
            f"accepted: {', '.join(ACCEPTED)}"
        )
    return value
