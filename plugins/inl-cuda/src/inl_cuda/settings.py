"""Environment variables of the CUDA backend."""

from __future__ import annotations

from typing import Final

from inl.plugin.environment import environment_choice

WEIGHTS: Final = "INL_CUDA_WEIGHTS"
"""Environment variable: how quantized weights of a file are stored on the device."""

ACCEPTED: Final = ("", "dense", "packed")

PERSISTENT: Final = "INL_CUDA_PERSISTENT"
"""Environment variable: whether a step of one row of a small model is one kernel."""


def requested_weights() -> str:
    """Read ``INL_CUDA_WEIGHTS``: "dense", "packed", or "" if it is not set.

    "dense" dequantizes weights to the compute dtype; "packed" stores the file's blocks,
    which takes less memory. By default, files are dequantized, and weights that are
    quantized while they are loaded are not. Raises :class:`DeviceError` for any other
    value.
    """
    return environment_choice(WEIGHTS, ACCEPTED)


def has_persistent_steps() -> bool:
    """Read ``INL_CUDA_PERSISTENT``: "0" or "1", the default.

    Raises :class:`DeviceError` for any other value.
    """
    return environment_choice(PERSISTENT, ("", "0", "1")) != "0"
