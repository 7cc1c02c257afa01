"""Reductions over the chunks of a row of logits, and sampling from their masses."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.step import INVALID_TOKEN

INVALID = tl.constexpr(INVALID_TOKEN)


@triton.jit
def chunk_top(
    x: tensor, at: tensor, V: tensor,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return the top logit of ``x`` at ids ``at``, and its lowest id.

    They are infinity and ``INVALID`` if a logit is NaN or infinity. Otherwise the id is
    one of the vocabulary, even where every logit is -inf.
    """
    x = tl.where(x == x, x, float("inf"))
    top_logit = tl.max(x, 0)
    top_id = tl.min(tl.where((x == top_logit) & (at < V), at, V - 1), 0)
    return top_logit, tl.where(top_logit < float("inf"), top_id, INVALID)


@triton.jit
def global_top(
    top_logits: tensor, top_ids: tensor, sample: tensor, CHUNKS: tl.constexpr,
    CHUNKS_P: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return the top logit of all chunks, and its lowest id.

    The id is ``INVALID`` if a logit is NaN or infinity, or all are -inf.
    """
    chunk = tl.arange(0, CHUNKS_P)
    mask = chunk < CHUNKS
    x = tl.load(top_logits + sample * CHUNKS + chunk, mask=mask, other=float("-inf"))
    top_logit = tl.max(x, 0)
    at = tl.load(top_ids + sample * CHUNKS + chunk, mask=mask, other=2147483647)
    top_id = tl.min(tl.where((x == top_logit) & mask, at, 2147483647), 0)
    return top_logit, tl.where(top_logit > float("-inf"), top_id, INVALID)


@triton.jit
def sample_chunk(
    mass: tensor, uniform: tensor, chunk: tensor,
) -> tuple[tensor, tensor, tensor, tensor]:  # fmt: skip
    """Sample a chunk: its index, the target mass, the mass before it, and the total.

    Sums taken in different orders differ in their last bits and leave gaps that no
    token owns. Therefore this one cumulative sum alone determines the chunk, and a
    chunk of mass 0 is never chosen.
    """
    cumulative = tl.cumsum(mass, 0)
    total = tl.max(cumulative, 0)
    target = uniform * total
    last = tl.max(tl.where(mass > 0, chunk, 0), 0)
    chosen = tl.min(tl.where((mass > 0) & (cumulative > target), chunk, last), 0)
    below = tl.max(tl.where(chunk < chosen, cumulative, 0.0), 0)
    return chosen, target, below, total


@triton.jit
def sample_id(
    mass: tensor, at: tensor, target: tensor, below: tensor,
) -> tensor:  # fmt: skip
    """Sample an id of ``at`` within the chunk, among the tokens of positive mass."""
    cumulative = below + tl.cumsum(mass, 0)
    last = tl.max(tl.where(mass > 0, at, 0), 0)
    return tl.min(tl.where((mass > 0) & (cumulative > target), at, last), 0)
