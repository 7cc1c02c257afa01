"""Step sizes and context lengths for which a program is compiled."""

from __future__ import annotations

from inl.backend.bucket_sizes import padded_buckets
from inl.spec.limits import Limits
from inl.spec.step import Bucket

PREFILL_SIZES = (64, 256, 512)
"""Tokens of steps that include prompts."""

DECODE_SIZES = (1, 4, 16, 64)
"""Rows of decoding steps; the largest batch is added."""

CONTEXTS = (256, 1024, 4096)
"""Tokens of the longest sequence of a step."""


def compiled_sizes(limits: Limits) -> tuple[Bucket, ...]:
    """Return the buckets to compile, smallest first, for every sampler."""
    return padded_buckets(limits, decodes=DECODE_SIZES, prefills=PREFILL_SIZES)


def context_lengths(limits: Limits) -> tuple[int, ...]:
    """Return the context lengths to compile; the runner adds the longest."""
    return tuple(length for length in CONTEXTS if length < limits.max_tokens)
