"""The highest logit of a sample, chunk by chunk."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def peak_of(
    x: tensor, at: tensor, V: tensor,
) -> tuple[tensor, tensor]:  # fmt: skip
    """The highest of the logits ``x`` at ids ``at``, and its lowest id."""
    peak = tl.max(x, 0)
    # Where every logit is NaN or -inf there is still an id.
    return peak, tl.min(tl.where((x == peak) & (at < V), at, V - 1), 0)


@triton.jit
def best(
    peaks: tensor, ids: tensor, sample: tensor, CHUNKS: tl.constexpr,
    CHUNKS_P: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """The highest logit of all chunks, and its lowest id."""
    chunk = tl.arange(0, CHUNKS_P)
    mask = chunk < CHUNKS
    x = tl.load(peaks + sample * CHUNKS + chunk, mask=mask, other=float("-inf"))
    peak = tl.max(x, 0)
    at = tl.load(ids + sample * CHUNKS + chunk, mask=mask, other=2147483647)
    return peak, tl.min(tl.where((x == peak) & mask, at, 2147483647), 0)
