"""Encodes plans as the frames and token masks that a runner reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inl.engine.prompt_embeddings import PromptEmbeddings
from inl.engine.prompt_images import PromptImages
from inl.protocol.runner import Limits
from inl.scheduling.plan import Admission, Chunk, Drafts, Plan
from inl.scheduling.request import Request, StepKind
from inl.spec.embedded_rows import token_inputs, with_inputs
from inl.spec.message import (
    DRAFT,
    FEEDBACK,
    MASKED,
    MAX_TOKEN_BIASES,
    POOLED,
    SCORED,
    STEP_NUMBERS,
    Row,
    TokenBias,
    admit_frame,
    release_frame,
    step_frame,
    token_bias_frame,
    uniform_count,
)
from inl.spec.scored_tokens import as_uniform
from inl.spec.step import Bucket
from inl.spec.uniforms import uniform

if TYPE_CHECKING:
    from inl.spec.embedded_rows import Floats
    from inl.spec.message import IntArray


FLAGS = {StepKind.SAMPLED: 0, StepKind.POOLED: POOLED, StepKind.SCORED: SCORED}


def frames(plan: Plan, limits: Limits, *, masked: bool = False) -> list[IntArray]:
    """Encode a plan as frames, in the order in which they must be submitted.

    masked: the step waits for masks, because :func:`masked_rows` lists rows.
    """
    encoded = [
        release_frame(
            slot, groups=limits.groups, max_blocks_per_seq=limits.max_blocks_per_seq
        )
        for slot in plan.releases
    ]
    for admission in plan.admissions:
        encoded.append(_admission(admission, limits))
        encoded += _token_biases(admission.request)
    if plan.bucket is not None:
        kind = plan.kind
        if kind is StepKind.SCORED:
            tokens = [_scored_row(chunk) for chunk in plan.chunks]
        else:
            tokens = [_row(chunk, plan.bucket) for chunk in plan.chunks]
        frame = step_frame(
            plan.bucket,
            tokens,
            plan.block_table_updates,
            step=plan.step % STEP_NUMBERS,
            groups=limits.groups,
            block_size=limits.block_size,
            decode_rows=plan.decode_rows,
            flags=MASKED if masked else FLAGS[kind],
        )
        rows, added, offsets, spans = _embeddings(plan)
        if rows or offsets:
            inputs = token_inputs(limits, rows, added, offsets, spans)
            frame = with_inputs(frame, inputs, limits)
        encoded.append(frame)
    return encoded


Rows = dict[int, "Floats"]
Numbers = dict[int, tuple[int, ...]]


def _embeddings(
    plan: Plan,
) -> tuple[Rows, Rows, Numbers, dict[int, tuple[int, int]]]:
    """Return embeddings, features, offsets and spans of tokens by index in a step."""
    spans: dict[int, tuple[int, int]] = {}
    rows: Rows = {}
    added: Rows = {}
    offsets: Numbers = {}
    first = 0
    for request, start, stop, _ in plan.chunks:
        embeddings = request.embeddings
        if embeddings is None:
            first += stop - start
            continue
        if start < request.prompt_tokens:
            assert isinstance(embeddings, PromptEmbeddings), "the engine made them"
            found = embeddings.between(start, stop)
            rows.update((first + at - start, row) for at, row in found.items())
            if isinstance(embeddings, PromptImages):
                both = embeddings.spans(start, stop)
                spans.update((first + at - start, each) for at, each in both.items())
        if request.moves:
            assert isinstance(embeddings, PromptImages), "the engine made them"
            more = embeddings.added(start, stop)
            added.update((first + at - start, row) for at, row in more.items())
            moved = embeddings.offsets(start, stop)
            offsets.update((first + at - start, each) for at, each in moved.items())
        first += stop - start
    return rows, added, offsets, spans


def masked_rows(plan: Plan) -> list[int]:
    """Return the rows of a plan that sample under a mask."""
    return [
        row
        for row, (request, _, stop, _) in enumerate(plan.chunks)
        if request.may_need_masks and request.samples_masked(stop)
    ]


def _admission(admission: Admission, limits: Limits) -> IntArray:
    request = admission.request
    params: Any = request.params
    return admit_frame(
        request.slot,
        request.block_table,
        groups=limits.groups,
        max_blocks_per_seq=limits.max_blocks_per_seq,
        length=admission.length,
        adapter=request.adapter,
        **params,
    )


def _token_biases(request: Request) -> list[IntArray]:
    """Encode the token counts, where penalties need them, and the logit bias.

    The runner itself counts the tokens that it samples from now on, when they are fed
    back.
    """
    counts = Counter[int]()
    if request.has_penalties:
        counts.update(dict.fromkeys(request.prompt_ids, 1))
        # Of the output only what is prefilled: the runner counts decoded tokens.
        for token in request.tokens[request.prompt_tokens : request.prefill_len]:
            counts[token] += 2
    bias = request.logit_bias or {}
    biases = [
        TokenBias(token, counts[token], bias.get(token, 0.0))
        for token in sorted({*counts, *bias})
    ]
    return [
        token_bias_frame(request.slot, biases[start : start + MAX_TOKEN_BIASES])
        for start in range(0, len(biases), MAX_TOKEN_BIASES)
    ]


def _row(chunk: Chunk, bucket: Bucket) -> Row:
    request, start, stop, drafts = chunk
    if drafts is not None:
        return _drafted_row(chunk, drafts, bucket)
    if bucket.repeat > 1:
        return _repeated_row(chunk)
    known = request.host_token_count
    if start >= known and not request.temperature:
        return request.feedback_row
    ids: Sequence[int] | IntArray = FEEDBACK
    if start < known:
        in_prompt = stop <= request.prompt_tokens
        ids = (request.prompt_array if in_prompt else request.tokens)[start:stop]
    if request.temperature and stop >= known:
        return Row(request.slot, ids, (uniform(request.seed, stop),))
    return Row(request.slot, ids)


def _scored_row(chunk: Chunk) -> Row:
    """Encode tokens of a prompt, and the one after them."""
    request, start, stop, _ = chunk
    last = as_uniform(request.tokens[stop])
    return Row(request.slot, request.prompt_array[start:stop], (last,))


def _repeated_row(chunk: Chunk) -> Row:
    request, start, stop, _ = chunk
    ids: Sequence[int] = FEEDBACK
    if start < request.host_token_count:
        ids = (request.tokens[start],)
    numbers: tuple[float, ...] = ()
    if request.temperature:
        positions = range(start + 1, stop + 1)
        numbers = tuple(uniform(request.seed, position) for position in positions)
    stops = sorted(request.end_ids)
    return Row(request.slot, ids, numbers, steps=stop - start, stop_ids=stops)


def _drafted_row(chunk: Chunk, drafts: Drafts, bucket: Bucket) -> Row:
    """Encode a row whose position the runner knows and this process may not."""
    request, start, stop, _ = chunk
    first: Sequence[int] = FEEDBACK
    if start < request.host_token_count:
        first = (request.tokens[start],)
    numbers: list[float] = []
    if request.temperature:
        numbers = [0.0] * uniform_count(bucket)
        for position in range(drafts.least + 1, stop + 1):
            number = uniform(request.seed, position)
            numbers[position % len(numbers)] = number
    words = [0] * (uniform_count(bucket) - 1)
    first_draft = drafts.least + 1 if stop - start > 1 else stop
    for position in range(first_draft, stop):
        words[position % len(words)] = drafts.tokens[position - drafts.position]
    ids = (*first, *(DRAFT,) * (stop - start - 1))
    return Row(request.slot, ids, numbers, words)
