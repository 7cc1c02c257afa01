"""Checks of a runner's reply to one step."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from inl.errors import ProtocolError
from inl.protocol.runner import Limits, Reply
from inl.scheduling.plan import Plan
from inl.scheduling.request import Status
from inl.scheduling.sampling_params import TokenLogprob, make_logprob
from inl.spec.message import STEP_NUMBERS
from inl.spec.step import INVALID_TOKEN, NO_TOKEN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def read_tokens(reply: Reply, plan: Plan, limits: Limits) -> list[int]:
    """Return the sampled token of each row, ``INVALID_TOKEN`` for those without one.

    Raises :class:`~inl.errors.ProtocolError` for another step, too few rows, or a
    token outside the vocabulary.
    """
    _check_shape(reply, plan, 1)
    tokens: list[int] = reply.tokens[: len(plan.chunks), 0].tolist()
    if min(tokens) < INVALID_TOKEN or max(tokens) >= limits.vocab:
        bad = next(t for t in tokens if not INVALID_TOKEN <= t < limits.vocab)
        raise _token_error(plan, tokens.index(bad), bad, limits)
    return tokens


def read_hidden(reply: Reply, plan: Plan) -> list[NDArray[np.float32]]:
    """Return the hidden state [H] of each row of a pooled step.

    Raises :class:`~inl.errors.ProtocolError` for another step, and without a row of
    numbers for each.
    """
    _check_shape(reply, plan, 1)
    shape = () if reply.hidden is None else reply.hidden.shape
    if reply.hidden is None or len(shape) != 2 or len(reply.hidden) < len(plan.chunks):
        raise ProtocolError(
            f"reply of step {plan.step}: found hidden states {list(shape)}, expected "
            f"[{len(plan.chunks)} or more, H]"
        )
    return list(reply.hidden[: len(plan.chunks)])


def read_accepted(reply: Reply, plan: Plan, limits: Limits) -> list[list[int]]:
    """Return the accepted tokens of each row of a step that verifies drafts.

    Raises :class:`~inl.errors.ProtocolError` as :func:`read_tokens`, and for a row
    without tokens, with more than it computed, or with tokens after the last one.
    """
    assert plan.bucket is not None, "plans of steps have a bucket"
    _check_shape(reply, plan, plan.bucket.tokens_per_row)
    accepted: list[list[int]] = []
    for row, (chunk, ids) in enumerate(
        zip(plan.chunks, reply.tokens.tolist(), strict=False)
    ):
        count = ids.index(NO_TOKEN) if NO_TOKEN in ids else len(ids)
        if not 1 <= count <= chunk.stop - chunk.start or any(
            token != NO_TOKEN for token in ids[count:]
        ):
            raise ProtocolError(
                f"reply of step {plan.step}, row {row}: found tokens {ids}, expected 1 "
                f"to {chunk.stop - chunk.start} tokens, then {NO_TOKEN}"
            )
        for token in ids[:count]:
            if not INVALID_TOKEN <= token < limits.vocab:
                raise _token_error(plan, row, token, limits)
        accepted.append(ids[:count])
    return accepted


def read_repeated(reply: Reply, plan: Plan, limits: Limits) -> list[list[int]]:
    """Return the sampled tokens of each row of a repeated step.

    Rows of requests that have finished may have any. Raises
    :class:`~inl.errors.ProtocolError` as :func:`read_tokens`, for tokens after the last
    one, and for a row that does not end where it should: after its planned steps, or
    earlier at the first end token or invalid one.
    """
    assert plan.bucket is not None, "plans of steps have a bucket"
    _check_shape(reply, plan, plan.bucket.repeat)
    rows: list[list[int]] = []
    for row, (chunk, ids) in enumerate(
        zip(plan.chunks, reply.tokens.tolist(), strict=False)
    ):
        count = ids.index(NO_TOKEN) if NO_TOKEN in ids else len(ids)
        rows.append(ids[:count])
        for token in ids[:count]:
            if not INVALID_TOKEN <= token < limits.vocab:
                raise _token_error(plan, row, token, limits)
        request, steps = chunk.request, chunk.stop - chunk.start
        if request.status is Status.FINISHED:
            continue
        ends = {INVALID_TOKEN, *request.end_ids}
        last = next((at for at, token in enumerate(ids) if token in ends), steps - 1)
        expected = min(last + 1, steps)
        if count != expected or any(token != NO_TOKEN for token in ids[count:]):
            raise ProtocolError(
                f"reply of step {plan.step}, row {row}: found tokens {ids}, expected "
                f"{expected} of {steps} steps, then {NO_TOKEN}; the end tokens are "
                f"{sorted(request.end_ids)}"
            )
    return rows


def _check_shape(reply: Reply, plan: Plan, tokens_per_row: int) -> None:
    rows, shape = len(plan.chunks), reply.tokens.shape
    step = plan.step % STEP_NUMBERS
    if reply.step != step:
        raise ProtocolError(f"reply: found step {reply.step}, expected {step}")
    if len(shape) != 2 or shape[0] < rows or shape[1] != tokens_per_row:
        raise ProtocolError(
            f"reply of step {plan.step}: found tokens {list(shape)}, "
            f"expected [{rows} or more, {tokens_per_row}]"
        )


def _token_error(plan: Plan, row: int, token: int, limits: Limits) -> ProtocolError:
    return ProtocolError(
        f"reply of step {plan.step}, row {row}: found token {token}, "
        f"the vocabulary is 0 to {limits.vocab - 1}"
    )


def read_logprobs(reply: Reply, plan: Plan) -> list[TokenLogprob]:
    """Return the log-probabilities of each row, none if no request asks for them.

    Raises :class:`~inl.errors.ProtocolError` if the reply lacks them.
    """
    if not _has_logprobs(plan):
        return []
    rows = len(plan.chunks)
    tokens = reply.tokens[:rows, 0].tolist()
    return _logprobs(reply, plan, tokens, _most_logprobs(plan))


def read_prompt_logprobs(reply: Reply, plan: Plan) -> list[list[TokenLogprob]]:
    """Return the log-probabilities of the token after each one of a scored step.

    One list per row. Raises :class:`~inl.errors.ProtocolError` for another step, and if
    the reply lacks them.
    """
    _check_shape(reply, plan, 1)
    following = [
        token
        for request, start, stop, _ in plan.chunks
        for token in request.tokens[start + 1 : stop + 1]
    ]
    most = max(each.request.prompt_logprobs or 0 for each in plan.chunks)
    scores = iter(_logprobs(reply, plan, following, most))
    return [
        [next(scores) for _ in range(stop - start)] for _, start, stop, _ in plan.chunks
    ]


def read_accepted_logprobs(
    reply: Reply, plan: Plan, accepted: list[list[int]]
) -> list[list[TokenLogprob]]:
    """Return the log-probabilities of the accepted tokens of each row, as above."""
    if not _has_logprobs(plan):
        return []
    counts = [chunk.stop - chunk.start for chunk in plan.chunks]
    padded = [
        token
        for ids, count in zip(accepted, counts, strict=True)
        for token in (*ids, *(NO_TOKEN,) * (count - len(ids)))
    ]
    scores = iter(_logprobs(reply, plan, padded, _most_logprobs(plan)))
    by_row = [[next(scores) for _ in range(count)] for count in counts]
    return [row[: len(ids)] for row, ids in zip(by_row, accepted, strict=True)]


def _has_logprobs(plan: Plan) -> bool:
    assert plan.bucket is not None, "plans of steps have a bucket"
    return plan.bucket.sampler == "sample_filtered" and any(
        chunk.request.logprobs is not None for chunk in plan.chunks
    )


def _most_logprobs(plan: Plan) -> int:
    """Return how many of the most likely tokens any request asks for."""
    return max(each.request.logprobs or 0 for each in plan.chunks)


def _logprobs(
    reply: Reply, plan: Plan, tokens: list[int], most: int
) -> list[TokenLogprob]:
    """Return the log-probabilities of the first samples, which are ``tokens``.

    most: how many of the most likely tokens there to return.
    """
    scores, count = reply.scores, len(tokens)
    if scores is None or min(len(part) for part in scores) < count:
        raise ProtocolError(
            f"reply of step {plan.step}: found no scores for {count} rows, "
            'which a "sample_filtered" program returns'
        )
    sampled = scores.chosen[:count].tolist()
    # By columns: a scored prefill has thousands of tokens, and mostly one column.
    ids, values = (part[:count, :most].T.tolist() for part in scores[1:])
    top = zip(*map(zip, ids, values), strict=True) if most else repeat(())
    return list(map(make_logprob, zip(tokens, sampled, top, strict=bool(most))))
