"""Which sizes of step get a program of their own."""

from __future__ import annotations

from inl.spec.limits import Limits
from inl.spec.step import Bucket

MOST = 24
"""Programs at most: each is a graph, with a capture and memory of its own."""

PREFILLS = (
    (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    (64, 256, 512, 1024, 2048, 8192),
    (64, 512, 2048, 8192),
)
"""Tokens of steps with prompts in them, the finer the fewer samplers there are."""


PROMPTS = (2048, 4096, 8192)
"""Tokens of steps that are one prompt, whose attention may be one call of a library."""


def ladder(limits: Limits) -> tuple[Bucket, ...]:
    """Decoding steps of 1, 2, 4, ... rows, and steps with prompts, for each sampler;
    where there is room for more, steps of one long prompt.

    Every sampler gets the largest sizes, for a step is planned to fit the costliest.
    Rungs are left out, evenly, until no more than :data:`MOST` programs remain. One
    that is never needed, as the token budget is smaller, is never captured either.
    """
    samplers, rows = limits.samplers, limits.slots - 1
    room = MOST // len(samplers)
    prefills = next(
        found for sizes in PREFILLS if len(found := fitting(sizes, limits)) <= room // 2
    )
    factor = 2
    while len(decodes := rungs(rows, factor)) + len(prefills) > room:
        factor *= 2
    sizes = [(count, count) for count in decodes]
    sizes += [(tokens, rows) for tokens in prefills]
    if rows > 1:
        # The last is a whole context, where that is not longer.
        alone = sorted({min(tokens, limits.max_tokens) for tokens in PROMPTS})
        alone = [tokens for tokens in alone if tokens >= PROMPTS[0]]
        spare = room - len(sizes)
        sizes += [(tokens, 1) for tokens in alone[-spare:] if spare]
    return tuple(
        Bucket(tokens, count, sampler=sampler)
        for tokens, count in sizes
        for sampler in samplers
    )


def fitting(sizes: tuple[int, ...], limits: Limits) -> list[int]:
    """The sizes that hold more than a token of each row, and no more than there are."""
    rows = limits.slots - 1
    longest = max(limits.max_tokens * rows, 1)
    more = [tokens for tokens in sizes if rows < tokens]
    return [tokens for tokens in more if tokens <= longest] or more[:1]


def rungs(rows: int, factor: int) -> list[int]:
    """1, factor, factor squared, ... and ``rows`` itself."""
    found = [1]
    while found[-1] * factor < rows:
        found.append(found[-1] * factor)
    return found if rows == 1 else [*found, rows]
