"""Which sizes of step get a program of their own."""

from __future__ import annotations

from inl.spec.values import Bucket, Limits

MOST = 24
"""Programs at most: each is a graph, with a capture and memory of its own."""

PREFILLS = (64, 256, 512, 2048)
"""Tokens of steps with prompts in them."""


def ladder(limits: Limits) -> tuple[Bucket, ...]:
    """Decoding steps of 1, 2, 4, ... rows, and steps with prompts, for each sampler.

    Every sampler gets the largest sizes, for a step is planned to fit the costliest.
    Rungs are left out, evenly, until no more than :data:`MOST` programs remain.
    """
    samplers, rows = limits.samplers, limits.slots - 1
    room = MOST // len(samplers)
    longest = max(limits.max_tokens * rows, 1)
    prefills = [tokens for tokens in PREFILLS if rows < tokens]
    fits = [tokens for tokens in prefills if tokens <= longest]
    prefills = (fits or prefills[:1])[-room // 2 :]
    factor = 2
    while len(decodes := rungs(rows, factor)) + len(prefills) > room:
        factor *= 2
    sizes = [(count, count) for count in decodes]
    sizes += [(tokens, rows) for tokens in prefills]
    return tuple(
        Bucket(tokens, count, sampler=sampler)
        for tokens, count in sizes
        for sampler in samplers
    )


def rungs(rows: int, factor: int) -> list[int]:
    """1, factor, factor squared, ... and ``rows`` itself."""
    found = [1]
    while found[-1] * factor < rows:
        found.append(found[-1] * factor)
    return found if rows == 1 else [*found, rows]
