"""Numbers of a cache in float8 (e4m3), converted by arithmetic on their bits.

So every chip reads and writes the same numbers, also those without instructions for
this format, or with another 8-bit one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.cache import Cache
from inl_torch.triton.quantized.kernels import unpack_8bit

NAN = tl.constexpr(127)
"""The bits of NaN, without its sign."""


@triton.jit
def from_cache(x: tensor, half: tl.constexpr) -> tensor:
    """Convert loaded numbers of a cache to dtype ``half``: bits of float8, exactly."""
    if x.dtype == tl.uint8:
        number = unpack_8bit(x, True)
        number = tl.where((x & NAN) == NAN, float("nan"), number)
    else:
        number = x
    return number.to(half)


@triton.jit
def to_cache(x: tensor, scales: tensor, PART: tl.constexpr) -> tensor:
    """Convert keys (``PART`` 0) or values (1) to what a cache stores.

    With scales that are bits of ``x / scale``, to nearest, ties to even, magnitudes
    above 448 to 448.
    """
    if scales is not None:
        scaled = tl.div_rn(x.to(tl.float32), tl.load(scales + PART))
        size = tl.minimum(tl.abs(scaled), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # Twenty bits of the mantissa are rounded off; a carry raises the exponent.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        # Below 2**-6 numbers are 2**-9 apart, as floats are from 2**14 on.
        small = (size + 16384.0).to(tl.int32, bitcast=True) & 15
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(scaled == scaled, code, NAN)
        sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 128
        result = (code | sign).to(tl.uint8)
    else:
        result = x
    return result


@triton.jit
def times(x: tensor, scales: tensor, PART: tl.constexpr) -> tensor:
    """Multiply by the scale of keys (``PART`` 0) or values (1), if there is one."""
    return x if scales is None else x * tl.load(scales + PART)


def stored(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as kernels take them: numbers in float8 as their bits."""
    if cache.scales is None:
        return cache.k, cache.v
    return cache.k.view(torch.uint8), cache.v.view(torch.uint8)
