"""Which program a step runs in, and how large a step may be so that one holds it."""

from __future__ import annotations

from inl.errors import RunnerError
from inl.protocol.runner import Limits
from inl.spec.step import SAMPLERS, Bucket


class Buckets:
    """The programs of a runner, and the largest step that they allow.

    A program serves rows that need less than its sampler too. So that a step never
    outgrows every program, steps are planned to fit one: the biggest (most rows, then
    most tokens) of the costliest sampler that there is.
    """

    def __init__(self, limits: Limits, *, token_budget: int, max_rows: int) -> None:
        usable = [
            bucket
            for bucket in limits.buckets
            if bucket.tokens_per_row == 1 and bucket.sampler in limits.samplers
        ]
        if limits.buckets and not usable:
            raise RunnerError(
                f"runner: its buckets sample {limits.buckets[0].tokens_per_row} tokens a row; "
                f"needs one of width 1 that is {' or '.join(limits.samplers)}"
            )
        self._buckets = sorted(usable, key=_size)
        served = {bucket.sampler for bucket in usable} or {limits.sampler}
        self.sampler = max(served, key=SAMPLERS.index)
        """The costliest of :data:`~inl.spec.step.SAMPLERS` that is served."""
        costliest = [bucket for bucket in usable if bucket.sampler == self.sampler]
        top = max(costliest, key=_capacity, default=None)
        tokens = min(token_budget, top.tokens) if top else token_budget
        self.tokens = tokens
        """Most tokens in a step."""
        self.rows = min(max_rows, tokens, top.rows if top else max_rows)
        """Most rows in a step, so that each of them can have a token."""

    def choose(self, tokens: int, rows: int, sampler: str) -> Bucket:
        """Return the smallest program that holds the step, or its exact size."""
        if not self._buckets:
            return Bucket(tokens, rows, sampler=sampler)
        rank = SAMPLERS.index(sampler)
        return next(
            bucket
            for bucket in self._buckets
            if bucket.tokens >= tokens
            and bucket.rows >= rows
            and SAMPLERS.index(bucket.sampler) >= rank
        )


def _size(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.tokens, bucket.rows, SAMPLERS.index(bucket.sampler)


def _capacity(bucket: Bucket) -> tuple[int, int]:
    return min(bucket.rows, bucket.tokens), bucket.tokens
