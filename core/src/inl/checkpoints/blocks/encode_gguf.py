"""Encoders of the block formats that GGUF files are written in.

Without importance, ``q8_0``, ``q4_0``, ``q5_0`` and ``q5_1`` are bitwise those of ggml.
Scales of the formats of 256 elements, and of ``q4_0`` and ``q5_0`` with importance, are
searched: of some scales around that of the largest element, each with the least squares
of its codes, the one with the least weighted error. Scales are rounded as they are
stored before the final codes are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from inl.checkpoints.blocks.dtypes import BLOCKS
from inl.dtypes import HostArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.blocks.decode_32 import Bytes, Floats

    Encoder: TypeAlias = Callable[[Floats, "Floats | None"], Bytes]

STEPS: Final = np.arange(-9, 10, dtype=np.float32) / 10
"""Changes of the largest code that a search of a symmetric scale tries."""
LINE_STEPS: Final = np.arange(-10, 11, dtype=np.float32) / 10
"""Changes of the largest code that a search of scale and offset tries."""
SIX_BITS: Final = 63
LOW: Final = np.uint8(15)
"""Low bits of a code that has others apart."""
TINY: Final = np.float32(1e-30)
ROUNDING: Final = np.float32(1e-5)
"""Bound of the relative rounding of a sum of 32 products."""


def encode_gguf(
    values: NDArray[np.float32], dtype: str, importance: Floats | None = None
) -> HostArray:
    """Return ``values`` [..., K] in a dtype of :data:`GGUF_ENCODERS`.

    K is a whole number of blocks. importance: weight [K] of the square of each column's
    error; dtypes without a search ignore it.
    """
    size, _ = BLOCKS[dtype]
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, size)
    weights = None
    if importance is not None:
        shape = len(blocks) * size // len(importance), len(importance)
        weights = np.broadcast_to(importance, shape).reshape(blocks.shape)
    with np.errstate(all="ignore"):
        data = GGUF_ENCODERS[dtype](blocks, weights)
    return HostArray(data.reshape(*values.shape[:-1], -1), dtype, values.shape)


def _q8_0(x: Floats, _importance: Floats | None) -> Bytes:
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scale)
    # ggml rounds halves away from zero.
    codes = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
    return _joined(scale.astype(np.float16), codes.astype(np.int8))


def _q4_0(x: Floats, importance: Floats | None) -> Bytes:
    scale, codes = _signed_codes(x, importance, 8)
    return _joined(scale, _halves(codes))


def _q5_0(x: Floats, importance: Floats | None) -> Bytes:
    scale, codes = _signed_codes(x, importance, 16)
    return _joined(scale, _fifth_bits(codes), _halves(codes & LOW))


def _q5_1(x: Floats, _importance: Floats | None) -> Bytes:
    low = x.min(1, keepdims=True)
    scale = (x.max(1, keepdims=True) - low) / np.float32(31)
    codes = np.trunc((x - low) * _inverse(scale) + np.float32(0.5)).astype(np.uint8)
    codes = np.minimum(codes, 31)
    heads = np.concatenate([scale, low], 1).astype(np.float16)
    return _joined(heads, _fifth_bits(codes), _halves(codes & LOW))


def _q4_k(x: Floats, importance: Floats | None) -> Bytes:
    heads, scales, codes = _lines(x, importance, 15)
    return _joined(heads, scales, _nibbles(codes))


def _q5_k(x: Floats, importance: Floats | None) -> Bytes:
    heads, scales, codes = _lines(x, importance, 31)
    places = np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((codes >> 4) << places, axis=1)
    return _joined(heads, scales, high, _nibbles(codes & LOW))


def _q6_k(x: Floats, importance: Floats | None) -> Bytes:
    groups = x.reshape(len(x), 16, 16)
    weights = groups * groups if importance is None else _weighted(x, importance)
    scales = symmetric_scale(x.reshape(-1, 16), weights.reshape(-1, 16), 32)
    scales = scales.reshape(-1, 16)
    peak = _largest(scales)
    whole = (peak / np.float32(-128)).astype(np.float16)
    small = np.clip(np.rint(scales * _inverse(whole)), -128, 127)
    step = whole.astype(np.float32) * small
    codes = np.clip(np.rint(groups * _inverse(step[:, :, None])), -32, 31) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] << 4)
    places = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> 4) << places, axis=2)
    return _joined(low, high, small.astype(np.int8), whole)


def symmetric_scale(
    x: Floats, weights: Floats, half: int, *, positive: bool = False
) -> Floats:
    """Return the scale [n, 1] of the codes of groups [n, G] with the least error.

    Codes are from ``-half`` to ``half - 1``; the scale may be negative unless
    ``positive``. weights: of the squares of errors, [n, G].
    """
    largest = _largest(x)[:, 0]
    x, weights = _turned(x), _turned(weights)
    first = half / (np.abs(largest) if positive else -largest)
    weighted = weights * x
    best, scale = np.zeros_like(largest), np.zeros_like(largest)
    for change in STEPS:
        codes = x * (first * np.float32(1 + change / half))
        np.clip(np.rint(codes, out=codes), -half, half - 1, out=codes)
        product = (weighted * codes).sum(0)
        codes *= codes
        codes *= weights
        square = codes.sum(0)
        ratio = np.where(square > 0, product / np.maximum(square, TINY), 0)
        # The error of a least-squares scale falls by this much from that of zeros.
        gain = ratio * product
        better = gain > best
        best, scale = np.where(better, gain, best), np.where(better, ratio, scale)
    return np.asarray(scale[:, None], np.float32)


def line_fit(x: Floats, weights: Floats, top: int) -> tuple[Floats, Floats]:
    """Return scale and subtracted offset [n, 1] of the least error of groups [n, G].

    Codes are from 0 to ``top``; both results are 0 or above, as the formats store them.
    weights: of the squares of errors, [n, G].
    """
    x, weights = _turned(x), _turned(weights)
    low = np.minimum(x.min(0), 0)
    per_step = _inverse(x.max(0) - low)
    above = x - low
    heavy = weights * x
    total, first, squares = weights.sum(0), heavy.sum(0), (heavy * x).sum(0)
    best, scale, offset = np.full_like(low, np.inf), np.zeros_like(low), -low
    for change in LINE_STEPS:
        codes = above * (np.float32(top + change) * per_step)
        np.clip(np.rint(codes, out=codes), 0, top, out=codes)
        product = (heavy * codes).sum(0)
        weighted = weights * codes
        mean = weighted.sum(0)
        weighted *= codes
        square = weighted.sum(0)
        spread = total * square - mean * mean
        slope = (total * product - mean * first) / np.maximum(spread, TINY)
        start = (square * first - mean * product) / np.maximum(spread, TINY)
        # The format has no positive offsets, and equal codes determine no line.
        through_zero = (start > 0) | (spread <= ROUNDING * total * square)
        slope = np.where(through_zero, product / np.maximum(square, TINY), slope)
        start = np.where(through_zero, 0, start)
        error = squares - 2 * (slope * product + start * first)
        error += slope * (slope * square + 2 * start * mean) + start * start * total
        better = (error < best) & (slope > 0)
        best = np.where(better, error, best)
        scale, offset = np.where(better, slope, scale), np.where(better, -start, offset)
    return (
        np.asarray(scale[:, None], np.float32),
        np.asarray(offset[:, None], np.float32),
    )


def _lines(x: Floats, importance: Floats | None, top: int) -> tuple[Any, Bytes, Bytes]:
    """Return two float16 and 12 bytes of scales a block, and codes [n, 8, 32]."""
    groups = x.reshape(len(x), 8, 32)
    if importance is None:
        mean = np.sqrt((groups * groups).mean(-1, keepdims=True))
        weights = mean + np.abs(groups)
    else:
        weights = _weighted(x, importance).reshape(groups.shape)
    found = line_fit(x.reshape(-1, 32), weights.reshape(-1, 32), top)
    scale, offset = (each.reshape(-1, 8) for each in found)
    peaks = np.stack([scale.max(1), offset.max(1)], 1)
    heads = (peaks / np.float32(SIX_BITS)).astype(np.float16)
    wide = heads.astype(np.float32)
    small = _six_bits(scale * _inverse(wide[:, :1]))
    shift = _six_bits(offset * _inverse(wide[:, 1:]))
    step = (wide[:, :1] * small)[:, :, None]
    below = (wide[:, 1:] * shift)[:, :, None]
    codes = np.clip(np.rint((groups + below) * _inverse(step)), 0, top)
    return heads, _packed_scales(small, shift), codes.astype(np.uint8)


def _packed_scales(scales: Bytes, offsets: Bytes) -> Bytes:
    """Pack 8 scales and 8 offsets of 6 bits: the inverse of the decoder's."""
    first = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    second = offsets[:, :4] | (offsets[:, 4:] >> 4 << 6)
    rest = (scales[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4
    return np.concatenate([first, second, rest], 1)


def _signed_codes(
    x: Floats, importance: Floats | None, half: int
) -> tuple[NDArray[np.float16], Bytes]:
    """Return a scale for each block, and codes in which ``half`` is zero."""
    if importance is None:
        wide = _largest(x) / np.float32(-half)
        stored = wide.astype(np.float16)
        codes = np.trunc(x * _inverse(wide) + np.float32(half + 0.5))
    else:
        stored = symmetric_scale(x, _weighted(x, importance), half).astype(np.float16)
        codes = np.rint(x * _inverse(stored)) + half
    return stored, np.clip(codes, 0, 2 * half - 1).astype(np.uint8)


def _weighted(x: Floats, importance: Floats) -> Floats:
    """Return weights of errors: importance, and somewhat more for large elements."""
    size = np.sqrt((x * x).mean(-1, keepdims=True) + x * x)
    return np.asarray(importance * size, np.float32)


def _largest(x: Floats) -> Floats:
    """Return the element of the largest magnitude, with its sign [..., 1]."""
    at = np.abs(x).argmax(-1)[..., None]
    return np.take_along_axis(x, at, -1)


def _turned(groups: Floats) -> Floats:
    """Return [G, n]: sums of few elements are fast along the first axis."""
    return np.ascontiguousarray(groups.T)


def _inverse(scale: NDArray[Any]) -> Floats:
    wide = scale.astype(np.float32)
    return np.where(wide == 0, np.float32(0), 1 / wide)


def _six_bits(values: Floats) -> Bytes:
    return np.clip(np.rint(values), 0, SIX_BITS).astype(np.uint8)


def _halves(codes: Bytes) -> Bytes:
    """Pack 32 codes of 4 bits: the second half above the first."""
    return np.asarray(codes[:, :16] | codes[:, 16:] << 4, np.uint8)


def _nibbles(codes: Bytes) -> Bytes:
    """Pack groups of 32 codes of 4 bits, two groups in 32 bytes."""
    pairs = codes.reshape(len(codes), 4, 2, 32)
    return np.asarray(pairs[:, :, 0] | pairs[:, :, 1] << 4, np.uint8)


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _joined(*parts: NDArray[Any]) -> Bytes:
    """Join the fields of blocks as bytes."""
    count = len(parts[0])
    flat = (np.ascontiguousarray(part).reshape(count, -1) for part in parts)
    return np.concatenate([part.view(np.uint8) for part in flat], 1)


GGUF_ENCODERS: Final[dict[str, Encoder]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
