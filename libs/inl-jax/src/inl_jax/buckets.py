"""Step sizes for which a program is compiled."""

from __future__ import annotations

from inl.backend.bucket_sizes import padded_buckets
from inl.spec.limits import Limits
from inl.spec.step import Bucket

PREFILL_SIZES = (64, 512, 2048)
"""Tokens of steps that include prompts. Few, since each costs seconds to compile."""

DECODE_SIZES = (1, 8, 32, 128)
"""Rows of decoding steps; the largest batch is added."""


def compiled_sizes(limits: Limits) -> tuple[Bucket, ...]:
    """Return the buckets to compile, smallest first, for every sampler."""
    return padded_buckets(limits, decodes=DECODE_SIZES, prefills=PREFILL_SIZES)
