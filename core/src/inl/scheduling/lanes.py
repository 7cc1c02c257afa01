"""Lanes: which decoding requests take part in a step of a pipeline.

A pipeline of S stages computes S steps at the same time if none needs the tokens of
another. So the requests are divided into as many lanes, and each has a token in every
S-th step. A lane is no property of a request: it may decode again once its last step is
S steps ago, or collected, and a step takes at most its share of the requests. Prompts
are in no lane: their parts follow one another through the stages.
"""

from __future__ import annotations

from inl.scheduling.request import Request

PARTS = 4
"""Steps per stage into which prompts are divided at least: S stages then wait for S - 1
steps of more than ``PARTS * S``."""

LEAST_TOKENS = 1024
"""Fewest tokens of such a step, as smaller ones take longer per token."""


def prompt_tokens(waiting: int, stages: int) -> int:
    """Return the most tokens of prompts in a step of a pipeline.

    waiting: tokens of all prompts that are to be computed.
    """
    return max(waiting // (PARTS * stages), LEAST_TOKENS)


def in_lane(step: int, requests: list[Request], stages: int) -> list[Request]:
    """Return the requests that may take part in a step, in order.

    All that are still in prefill, and those that decode in this lane. step: its number.
    requests: all that run.
    """
    decoding = [each for each in requests if each.scheduled >= each.prefill_len]
    lanes = min(stages, len(decoding))
    if lanes < 2:
        return requests
    ready = [
        each
        for each in decoding
        if not each.in_flight or each.last_step <= step - lanes
    ]
    ready.sort(key=lambda request: request.last_step)
    lane = {request.id for request in ready[: -(-len(decoding) // lanes)]}
    return [
        each
        for each in requests
        if each.scheduled < each.prefill_len or each.id in lane
    ]
