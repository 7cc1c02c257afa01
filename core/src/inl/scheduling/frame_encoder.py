"""Plans written as the frames that a runner reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inl.protocol.runner import Limits
from inl.scheduling.plan import Admission, Chunk, Plan
from inl.scheduling.request import Request
from inl.scheduling.uniforms import uniform
from inl.spec.message import (
    FEEDBACK,
    MAX_TOKEN_BIASES,
    Row,
    TokenBias,
    admit_frame,
    release_frame,
    step_frame,
    token_bias_frame,
)

if TYPE_CHECKING:
    from inl.spec.message import IntArray

STEP_NUMBERS = 1 << 31
"""Step numbers start again from 0 here on the wire, after a month of serving."""


def frames(plan: Plan, limits: Limits) -> list[IntArray]:
    """Write a plan as messages, in the order in which the runner must have them."""
    found = [
        release_frame(
            slot, groups=limits.groups, max_blocks_per_seq=limits.max_blocks_per_seq
        )
        for slot in plan.releases
    ]
    for admission in plan.admissions:
        found.append(_admission(admission, limits))
        found += _marks(admission.request)
    if plan.bucket is not None:
        found.append(
            step_frame(
                plan.bucket,
                [_row(chunk) for chunk in plan.chunks],
                plan.cells,
                step=plan.step % STEP_NUMBERS,
                groups=limits.groups,
                block_size=limits.block_size,
                decode_rows=plan.decode_rows,
            )
        )
    return found


def _admission(admission: Admission, limits: Limits) -> IntArray:
    request = admission.request
    params: Any = request.params
    return admit_frame(
        request.slot,
        request.table,
        groups=limits.groups,
        max_blocks_per_seq=limits.max_blocks_per_seq,
        length=admission.length,
        adapter=request.adapter,
        **params,
    )


def _marks(request: Request) -> list[IntArray]:
    """Tell which tokens a request holds by now, where that matters, and its biases.

    Those that the runner chooses from now on, it counts itself when they are fed back.
    """
    counts = Counter[int]()
    if request.penalized:
        counts.update(dict.fromkeys(request.prompt, 1))
        # Of the answer, those in chunks: a runner counts what is fed one by one.
        for token in request.tokens[request.prompt_tokens : request.prefill_len]:
            counts[token] += 2
    bias = request.logit_bias or {}
    marks = [
        TokenBias(token, counts[token], bias.get(token, 0.0))
        for token in sorted({*counts, *bias})
    ]
    return [
        token_bias_frame(request.slot, marks[at : at + MAX_TOKEN_BIASES])
        for at in range(0, len(marks), MAX_TOKEN_BIASES)
    ]


def _row(chunk: Chunk) -> Row:
    request, start, stop = chunk
    known = request.host_token_count
    if start >= known and not request.temperature:
        return request.feedback
    ids: Sequence[int] | IntArray = FEEDBACK
    if start < known:
        within = stop <= request.prompt_tokens
        ids = (request.words if within else request.tokens)[start:stop]
    if request.temperature and stop >= known:
        return Row(request.slot, ids, (uniform(request.seed, stop),))
    return Row(request.slot, ids)
