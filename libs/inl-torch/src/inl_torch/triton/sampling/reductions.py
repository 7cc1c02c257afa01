"""What is decided about a sample from what its chunks tell."""

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


@triton.jit
def drawn_chunk(
    mass: tensor, uniform: tensor, chunk: tensor,
) -> tuple[tensor, tensor, tensor, tensor]:  # fmt: skip
    """Where a draw over the chunks' masses falls: the chunk, what it has to pass, what
    the chunks before have, and all.

    Sums of other orders differ in their last bits, and between them lies nobody's
    share: so this one alone decides, and a chunk without mass is never chosen.
    """
    upto = tl.cumsum(mass, 0)
    total = tl.max(upto, 0)
    goal = uniform * total
    last = tl.max(tl.where(mass > 0, chunk, 0), 0)
    found = tl.min(tl.where((mass > 0) & (upto > goal), chunk, last), 0)
    below = tl.max(tl.where(chunk < found, upto, 0.0), 0)
    return found, goal, below, total


@triton.jit
def drawn_id(
    mass: tensor, at: tensor, goal: tensor, below: tensor,
) -> tensor:  # fmt: skip
    """The id ``at`` which a draw falls on in its chunk, one of those that have mass."""
    upto = below + tl.cumsum(mass, 0)
    last = tl.max(tl.where(mass > 0, at, 0), 0)
    return tl.min(tl.where((mass > 0) & (upto > goal), at, last), 0)
