"""Step sizes and context lengths for which a program is compiled."""

from __future__ import annotations

from inl.spec.limits import Limits
from inl.spec.step import Bucket

PREFILL_SIZES = (64, 256, 512)
"""Tokens of steps that include prompts."""

DECODE_SIZES = (1, 4, 16, 64)
"""Rows of decoding steps; the largest batch is added."""

CONTEXTS = (256, 1024, 4096)
"""Tokens of the longest sequence of a step."""


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


def context_lengths(limits: Limits) -> tuple[int, ...]:
    """Return the context lengths to compile; the runner adds the longest."""
    return tuple(length for length in CONTEXTS if length < limits.max_tokens)
