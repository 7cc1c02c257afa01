"""Step sizes for which a graph is captured."""

from __future__ import annotations

from inl.spec.limits import Limits
from inl.spec.step import Bucket

MAX_GRAPHS = 64
"""Most buckets: each is a graph, with a capture time and memory of its own."""

SHORT_SIZES = (64, 128, 256, 512)
"""Tokens of steps with short prompts, in engines of more rows than half of them."""

PREFILL_SIZES = (
    (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    (64, 256, 512, 1024, 2048, 4096, 8192),
    (64, 512, 2048, 8192),
)
"""Tokens of steps that include prompts, from the finest series to the coarsest."""

PROMPT_SIZES = (2048, 4096, 8192)
"""Tokens of steps that are one prompt, whose attention can be a single library call.

A larger token budget is one more size of both."""


FEW_ROWS = 8
"""Rows up to which steps verify as many drafts as are allowed."""


def capture_sizes(limits: Limits) -> tuple[Bucket, ...]:
    """Return the buckets to capture, at most :data:`MAX_GRAPHS` without speculation.

    Decoding steps of 1, 2, 4, ... rows have a bucket for each sampler. Steps with
    prompts take longer, so that only the cheapest and the costliest sampler have
    buckets of their own; the series of their sizes is the finest that the number of
    graphs permits. A bucket that exceeds the token budget is never captured.
    """
    samplers, rows = limits.samplers, limits.slots - 1
    decodes = [(count, count) for count in decode_sizes(rows)]
    prefill_samplers = tuple(dict.fromkeys((samplers[0], samplers[-1])))
    spare = MAX_GRAPHS - len(decodes) * len(samplers)
    per_sampler = spare // len(prefill_samplers)
    prefills = next(
        fits
        for sizes in PREFILL_SIZES
        if len(fits := prefill_sizes(sizes, limits)) <= per_sampler
    )
    return (
        *(
            Bucket(tokens=tokens, rows=count, sampler=sampler)
            for sizes, names in ((decodes, samplers), (prefills, prefill_samplers))
            for tokens, count in sizes
            for sampler in names
        ),
        *verify_sizes(limits),
    )


def verify_sizes(limits: Limits) -> list[Bucket]:
    """Steps that verify drafts of 1, 4, 8, 16, ... and all rows, few and many.

    Few rows have the time for many drafts each; many rows for a few. The cheapest
    sampler has no buckets of its own if there is another one.
    """
    rows, width = limits.slots - 1, limits.max_drafts + 1
    counts = {count for count in decode_sizes(rows) if count != 2} | {rows}
    sizes = {
        (min(tokens, count * width), count)
        for count in counts
        for tokens in (
            count * 2,
            count * 4,
            *((count * 8, count * width) if count <= FEW_ROWS else ()),
        )
    }
    return [
        Bucket(tokens=tokens, rows=count, tokens_per_row=width, sampler=sampler)
        for tokens, count in sorted(sizes)
        for sampler in limits.samplers[-2:]
        if width > 1
    ]


def prefill_sizes(series: tuple[int, ...], limits: Limits) -> list[tuple[int, int]]:
    """Tokens and rows of steps with prompts: of short prompts, of all rows, of one.

    Sizes end with the tokens of all sequences, those of one prompt with its longest.
    """
    rows, longest = limits.slots - 1, limits.max_tokens
    sizes = [(tokens, tokens // 2) for tokens in SHORT_SIZES if tokens // 2 < rows]
    sizes = [size for size in sizes if size[0] <= rows]
    budget = limits.token_budget
    larger = (budget,) if budget > PROMPT_SIZES[-1] else ()
    large = [tokens for tokens in (*series, *larger) if tokens > rows]
    fitting = [tokens for tokens in large if tokens <= max(longest * rows, 1)]
    sizes += [(tokens, rows) for tokens in fitting or large[:1]]
    if rows > 1:
        # The largest is a whole context, where that is shorter.
        prompts = sorted({min(each, longest) for each in (*PROMPT_SIZES, *larger)})
        sizes += [(tokens, 1) for tokens in prompts if tokens >= PROMPT_SIZES[0]]
    return sizes


def decode_sizes(rows: int) -> list[int]:
    """1, 2, 4, ..., and ``rows`` itself."""
    sizes = [1]
    while sizes[-1] * 2 < rows:
        sizes.append(sizes[-1] * 2)
    return sizes if rows == 1 else [*sizes, rows]
