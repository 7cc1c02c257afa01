"""Checks of a runner's reply to one step."""

from __future__ import annotations

from inl.errors import ProtocolError
from inl.protocol.runner import Limits, Reply
from inl.scheduling.frame_encoder import STEP_NUMBERS
from inl.scheduling.plan import Plan
from inl.scheduling.sampling_params import TokenLogprob
from inl.spec.step import INVALID_TOKEN


def read_tokens(reply: Reply, plan: Plan, limits: Limits) -> list[int]:
    """Return the sampled token of each row, ``INVALID_TOKEN`` for those without one.

    Raises :class:`~inl.errors.ProtocolError` for another step, too few rows, or a
    token outside the vocabulary.
    """
    rows = len(plan.chunks)
    step = plan.step % STEP_NUMBERS
    if reply.step != step:
        raise ProtocolError(f"reply: found step {reply.step}, expected {step}")
    shape = reply.tokens.shape
    if len(shape) != 2 or shape[0] < rows or shape[1] != 1:
        raise ProtocolError(
            f"reply of step {plan.step}: found tokens {list(shape)}, "
            f"expected [{rows} or more, 1]"
        )
    tokens: list[int] = reply.tokens[:rows, 0].tolist()
    if min(tokens) < INVALID_TOKEN or max(tokens) >= limits.vocab:
        bad = next(t for t in tokens if not INVALID_TOKEN <= t < limits.vocab)
        raise ProtocolError(
            f"reply of step {plan.step}, row {tokens.index(bad)}: found token {bad}, "
            f"the vocabulary is 0 to {limits.vocab - 1}"
        )
    return tokens


def read_logprobs(reply: Reply, plan: Plan) -> list[TokenLogprob]:
    """Return the log-probabilities of each row, none if no request asks for them.

    Raises :class:`~inl.errors.ProtocolError` if the reply lacks them.
    """
    rows = len(plan.chunks)
    assert plan.bucket is not None
    if plan.bucket.sampler != "sample_filtered" or not any(
        chunk.request.logprobs is not None or chunk.request.prompt_logprobs is not None
        for chunk in plan.chunks
    ):
        return []
    scores = reply.scores
    if scores is None or min(len(part) for part in scores) < rows:
        raise ProtocolError(
            f"reply of step {plan.step}: found no scores for {rows} rows, "
            'which a "sample_filtered" program returns'
        )
    sampled, ids, values = (part[:rows].tolist() for part in scores)
    tokens = reply.tokens[:rows, 0].tolist()
    return [
        TokenLogprob(
            tokens[row], sampled[row], tuple(zip(ids[row], values[row], strict=True))
        )
        for row in range(rows)
    ]
