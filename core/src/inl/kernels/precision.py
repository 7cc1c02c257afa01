"""Rounding to narrower dtypes, exact in every framework."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import rounded as rounded_host
from inl.functional.dynamics import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT8 = "float8_e4m3fn"
LARGEST_FLOAT8 = 448.0


def rounded(x: Any, dtype: str) -> Any:
    """Round to nearest, ties to even, in an array of the same dtype.

    dtype: "bfloat16", "float16" or "float8_e4m3fn"; of the last, magnitudes above 448
    become 448, and the gradient is that of the identity.
    """
    framework = framework_of("rounded", "x", x)
    if framework == "jax":
        return _jax(x, dtype)
    if framework == "torch":
        narrow = getattr(import_module("torch"), dtype)
        if dtype != FLOAT8:
            return x.to(narrow).to(x.dtype)
        limited = x.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
        # The gradient is that of ``limited``; the sum is exact.
        return limited + (limited.to(narrow).to(x.dtype) - limited).detach()
    return _float8(x) if dtype == FLOAT8 else rounded_host(x, dtype)


def scaled_float8(x: Any, xp: Any) -> tuple[Any, Any]:
    """Return ``x`` rounded to float8 after scaling its largest magnitude to 448, and
    the factor that undoes the scaling.
    """
    largest = xp.maximum(xp.max(xp.abs(x)), 1e-12)
    factor = largest / LARGEST_FLOAT8
    return rounded(x / factor, FLOAT8), factor


def _jax(x: Any, dtype: str) -> Any:
    jax = import_module("jax")
    jnp, bitcast = jax.numpy, jax.lax.bitcast_convert_type
    limited = x
    if dtype == FLOAT8:
        limited = jnp.clip(x, -LARGEST_FLOAT8, LARGEST_FLOAT8)
    # XLA may drop a pair of conversions, but not those of bits.
    bits = bitcast(limited.astype(dtype), np.uint8 if dtype == FLOAT8 else np.uint16)
    narrow = bitcast(bits, dtype).astype(x.dtype)
    difference = jax.lax.stop_gradient(narrow - limited)
    return jnp.where(jnp.isfinite(difference), limited + difference, narrow)


@cache
def _float8_values() -> NDArray[Any]:
    """Every finite float8 magnitude, ascending: 0 to 448."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal)


def _float8(x: Any) -> Any:
    values = _float8_values()
    size = np.minimum(np.abs(x), LARGEST_FLOAT8)
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    middle = (low + high) / 2
    # The code of ``high`` is even, so that a tie goes up, at even positions.
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), x).astype(x.dtype)
