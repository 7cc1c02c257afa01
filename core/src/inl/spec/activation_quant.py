"""Activation quantization that a kernel may apply, modeled in NumPy.

A kernel that rounds the inputs of its matrix products declares a name from
:data:`ACTIVATION_QUANTS` in ``Kernel.activation_quant``. With packed weights it is then
compared with a body that rounds its inputs the same way (:mod:`inl.spec.tolerance`);
with plain weights it is held to the same tolerance as every other kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

GROUP: Final = 32
"""Consecutive elements that share a scale; most weight formats use the same size."""

LARGEST_FLOAT8: Final = 448.0
"""Largest magnitude of E4M3."""


def int8_groups(x: Any) -> Any:
    """Round ``x`` [..., K] to int8 values times one scale per group of 32.

    Returns the rounded values in the dtype of ``x``. K need not be a multiple of 32.
    """
    x = np.asarray(x)
    short = -x.shape[-1] % GROUP
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    groups = padded.reshape(*x.shape[:-1], -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    codes = np.rint(groups / np.where(scale > 0, scale, 1))
    return (codes * scale).reshape(padded.shape)[..., : x.shape[-1]].astype(x.dtype)


def float8_rows(x: Any) -> Any:
    """Round ``x`` [..., K] to float8 (E4M3) values times one scale per row.

    Returns the rounded values in the dtype of ``x``.
    """
    x = np.asarray(x)
    largest = np.abs(x).max(-1, keepdims=True)
    scale = np.where(largest > 0, largest, 1) / LARGEST_FLOAT8
    size = np.abs(x) / scale
    # Numbers of 4 digits; subnormal ones are 2**-9 apart.
    exponent = np.maximum(np.frexp(size)[1] - 4, -9)
    codes = np.ldexp(np.rint(np.ldexp(size, -exponent)), exponent)
    return (np.copysign(codes, x) * scale).astype(x.dtype)


INT8: Final = "int8 in groups of 32"
FLOAT8: Final = "float8 in rows"

ACTIVATION_QUANTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    INT8: int8_groups, FLOAT8: float8_rows,
}  # fmt: skip
"""Every rounding that ``Kernel.activation_quant`` may name."""
