"""Step sizes for which a graph is captured."""

from __future__ import annotations

from inl.spec.limits import Limits
from inl.spec.step import Bucket

MAX_GRAPHS = 24
"""Most buckets: each is a graph, with a capture time and memory of its own."""

PREFILL_SIZES = (
    (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    (64, 256, 512, 1024, 2048, 8192),
    (64, 512, 2048, 8192),
)
"""Tokens of steps that include prompts, from the finest series to the coarsest. More
samplers need a coarser one."""

PROMPT_SIZES = (2048, 4096, 8192)
"""Tokens of steps that are one prompt, whose attention can be a single library call."""


def capture_sizes(limits: Limits) -> tuple[Bucket, ...]:
    """Return the buckets to capture, at most :data:`MAX_GRAPHS`.

    For each sampler: decoding steps of 1, 2, 4, ... rows, steps with prompts, and, if
    the number of graphs permits, steps of one long prompt. Every sampler gets the
    largest sizes, since a step is planned to fit the costliest sampler. The series of
    decoding steps is thinned out until the number of graphs is within the limit. A
    bucket that exceeds the token budget is never captured.
    """
    samplers, rows = limits.samplers, limits.slots - 1
    per_sampler = MAX_GRAPHS // len(samplers)
    prefills = next(
        fits
        for sizes in PREFILL_SIZES
        if len(fits := prefill_sizes(sizes, limits)) <= per_sampler // 2
    )
    factor = 2
    while len(decodes := decode_sizes(rows, factor)) + len(prefills) > per_sampler:
        factor *= 2
    sizes = [(count, count) for count in decodes]
    sizes += [(tokens, rows) for tokens in prefills]
    if rows > 1:
        # The largest is a whole context, where that is shorter.
        prompts = sorted({min(tokens, limits.max_tokens) for tokens in PROMPT_SIZES})
        prompts = [tokens for tokens in prompts if tokens >= PROMPT_SIZES[0]]
        spare = per_sampler - len(sizes)
        sizes += [(tokens, 1) for tokens in prompts[-spare:] if spare]
    return tuple(
        Bucket(tokens, count, sampler=sampler)
        for tokens, count in sizes
        for sampler in samplers
    )


def prefill_sizes(sizes: tuple[int, ...], limits: Limits) -> list[int]:
    """Sizes of more than one token per row, up to the tokens of all sequences."""
    rows = limits.slots - 1
    longest = max(limits.max_tokens * rows, 1)
    large = [tokens for tokens in sizes if rows < tokens]
    return [tokens for tokens in large if tokens <= longest] or large[:1]


def decode_sizes(rows: int, factor: int) -> list[int]:
    """1, factor, factor squared, ..., and ``rows`` itself."""
    sizes = [1]
    while sizes[-1] * factor < rows:
        sizes.append(sizes[-1] * factor)
    return sizes if rows == 1 else [*sizes, rows]
