"""Step sizes for which a program is compiled."""

from __future__ import annotations

from inl.spec.limits import Limits
from inl.spec.step import Bucket

PREFILL_SIZES = (64, 512, 2048)
"""Tokens of steps that include prompts. Few, since each costs seconds to compile."""

DECODE_SIZES = (1, 8, 32, 128)
"""Rows of decoding steps; the largest batch is added."""


def compiled_sizes(limits: Limits) -> tuple[Bucket, ...]:
    """Return the buckets to compile, smallest first, for every sampler.

    No bucket exceeds the token budget, unless all rows together do.
    """
    rows = limits.slots - 1
    decodes = [size for size in DECODE_SIZES if 2 * size <= rows] + [rows]
    longest = max(min(limits.token_budget, limits.max_tokens * rows), rows)
    prefills = [size for size in PREFILL_SIZES if rows < size < longest]
    sizes = [(count, count) for count in decodes]
    sizes += [(tokens, rows) for tokens in prefills]
    if longest > rows:
        sizes.append((longest, rows))
    buckets = [Bucket(*size) for size in sizes]
    if limits.max_drafts:
        width = limits.max_drafts + 1
        buckets += [Bucket(count * width, count, width) for count in decodes]
    return tuple(
        bucket._replace(sampler=sampler)
        for bucket in buckets
        for sampler in limits.samplers
    )
