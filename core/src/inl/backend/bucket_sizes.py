"""Step sizes for backends whose programs have static shapes."""

from __future__ import annotations

from collections.abc import Iterable

from inl.spec.limits import Limits
from inl.spec.step import Bucket


def padded_buckets(
    limits: Limits, *, decodes: Iterable[int], prefills: Iterable[int]
) -> tuple[Bucket, ...]:
    """Return the buckets to compile, smallest first, for every sampler.

    decodes: rows of decoding steps; the largest batch is added. prefills: tokens of
    steps that include prompts; the largest step is added. No bucket exceeds the token
    budget, unless all rows together do.
    """
    rows = limits.slots - 1
    counts = [size for size in decodes if 2 * size <= rows] + [rows]
    longest = max(min(limits.token_budget, limits.max_tokens * rows), rows)
    sizes = [(count, count) for count in counts]
    sizes += [(tokens, rows) for tokens in prefills if rows < tokens < longest]
    if longest > rows:
        sizes.append((longest, rows))
    buckets = [Bucket(tokens=tokens, rows=count) for tokens, count in sizes]
    if limits.max_drafts:
        width = limits.max_drafts + 1
        buckets += [
            Bucket(tokens=count * width, rows=count, tokens_per_row=width)
            for count in counts
        ]
    return tuple(
        bucket._replace(sampler=sampler)
        for bucket in buckets
        for sampler in limits.samplers
    )
