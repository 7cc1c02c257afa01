"""Lanes: which decoding requests take part in a step of a pipeline.

A pipeline of S stages computes S steps at the same time if none needs the tokens of
another. So the requests are divided into as many lanes, and each has a token in every
S-th step. A lane is no property of a request: it may decode again once its last step is
S steps ago, or collected, and a step takes at most its share of the requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from inl.scheduling.request import Request


def decoding_in(
    step: int, requests: Iterable[Request], stages: int
) -> Collection[int] | None:
    """Return the ids of the requests that may decode in a step; ``None`` for all.

    step: its number. requests: all that run.
    """
    decoding = [each for each in requests if each.scheduled >= each.prefill_len]
    lanes = min(stages, len(decoding))
    if lanes < 2:
        return None
    ready = [
        each
        for each in decoding
        if not each.in_flight or each.last_step <= step - lanes
    ]
    ready.sort(key=lambda request: request.last_step)
    return {request.id for request in ready[: -(-len(decoding) // lanes)]}
