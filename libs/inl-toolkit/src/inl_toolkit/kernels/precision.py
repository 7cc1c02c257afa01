"""Rounding to narrower dtypes, exact in every framework."""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.dtypes import rounded as rounded_host
from inl_toolkit.functional.dynamics import framework_of

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
        return _torch(x, dtype, import_module("torch"))
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


def _torch(x: Any, dtype: str, torch: Any) -> Any:
    narrow = getattr(torch, dtype)
    limited = x
    if dtype == FLOAT8:
        limited = x.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    if torch.compiler.is_compiling() and x.dtype in (torch.float32, torch.float64):
        # torch's compiler drops a pair of conversions, even one through integers.
        result = _rounded_bits(limited.detach(), dtype, torch)
    else:
        result = limited.to(narrow).to(x.dtype)
        if dtype != FLOAT8:
            return result
    # The gradient is that of ``limited``; the sum is exact where it is finite.
    difference = (result - limited).detach()
    return torch.where(difference.isfinite(), limited + difference, result)


class _Format(NamedTuple):
    """A floating-point format."""

    digits: int
    """Binary digits after the first."""
    smallest: float
    """Spacing of its subnormal numbers."""
    overflow: float
    """Least magnitude that is rounded to infinity."""


_FORMATS = {
    "bfloat16": _Format(7, 2.0**-133, (2 - 2.0**-8) * 2.0**127),
    "float16": _Format(10, 2.0**-24, 65520.0),
    FLOAT8: _Format(3, 2.0**-9, math.inf),
}


def _rounded_bits(x: Any, dtype: str, torch: Any) -> Any:
    """Round float32 or float64 by arithmetic on its bits; of float8, at most 448."""
    wide = x.dtype == torch.float64
    digits, smallest, overflow = _FORMATS[dtype]
    own = 52 if wide else 23
    dropped = own - digits
    bits = x.view(torch.int64 if wide else torch.int32)
    half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    result = ((bits + half) & -(1 << dropped)).view(x.dtype)
    size = x.abs()
    if wide or dtype != "bfloat16":  # which has the subnormal numbers of float32
        # At ``shift`` all of the wider format are multiples of ``smallest``.
        shift = smallest * 2.0**own
        small = torch.copysign((size + shift) - shift, x)
        result = torch.where(size < smallest * 2.0**digits, small, result)
    infinite = torch.copysign(torch.full_like(x, torch.inf), x)
    result = torch.where(size >= overflow, infinite, result)
    return torch.where(x.isfinite(), result, x)


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
