"""Choice of the compiled program (bucket) of a step, and the largest step allowed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from inl.errors import RunnerError
from inl.protocol.runner import Limits
from inl.spec.step import SAMPLERS, Bucket

if TYPE_CHECKING:
    from inl.scheduling.plan import Chunk

LEAST_STEP = 256
"""Tokens of a step that takes about as long as one of fewer, which reads all weights
too."""


class Buckets:
    """The programs of a runner that a scheduler can use, and the step size they allow.

    A program also serves rows that need a cheaper sampler than its own. In a program of
    one token per row (``tokens == rows``) each token attends on its own, so a step with
    prompts takes one of more tokens than rows, if there is one. Steps are
    limited to the largest program (most rows, then most tokens) with the costliest
    available sampler, so that every step fits one program. Raises
    :class:`~inl.errors.RunnerError` if no program samples one token per row.
    """

    def __init__(self, limits: Limits, *, token_budget: int, max_rows: int) -> None:
        usable = [
            bucket
            for bucket in limits.buckets
            if bucket.tokens_per_row == 1
            and bucket.repeat == 1
            and bucket.sampler in limits.samplers
        ]
        if limits.buckets and not usable:
            raise RunnerError(
                "runner: no usable program: found "
                f"{limits.buckets[0].tokens_per_row} tokens per row, needs one token "
                f"per row with sampler {' or '.join(limits.samplers)}"
            )
        self._buckets = sorted(usable, key=_size)
        self._verifiers = sorted(filter(_verifies, limits.buckets), key=_size)
        self.stop_ids = limits.stop_ids
        """Most stop ids of a row of a repeated step."""
        self._repeaters = sorted(filter(_repeats, limits.buckets), key=_size)
        served = {bucket.sampler for bucket in usable} or {limits.sampler}
        self.sampler = max(served, key=SAMPLERS.index)
        """The costliest of :data:`~inl.spec.step.SAMPLERS` that is served."""
        self._prompts = [
            (bucket.tokens, bucket.rows)
            for bucket in self._buckets
            if bucket.tokens > bucket.rows and bucket.sampler == self.sampler
        ]
        """Tokens and rows of the programs of steps with prompts, smallest first."""
        costliest = [bucket for bucket in usable if bucket.sampler == self.sampler]
        largest = max(costliest, key=_capacity, default=None)
        tokens = min(token_budget, largest.tokens) if largest else token_budget
        ranks = limits.data_ranks
        self.tokens = tokens = max(tokens // ranks, 1) * ranks
        """Maximum number of tokens in a step."""
        self.rows = min(max_rows, tokens, largest.rows if largest else max_rows)
        """Maximum number of rows in a step; each row can have at least one token."""
        self.ranks = ranks
        """Ranks that divide the rows of a step, which must fit on each of them."""
        rows = largest.rows if largest else limits.slots - 1
        self.rank_rows = min(limits.slots - 1, tokens, rows) // ranks
        """Maximum number of rows of one of these ranks."""

    def padded(self, chunks: Sequence[Chunk]) -> tuple[int, int]:
        """Return the tokens and rows of a bucket in which each rank's rows fit."""
        if self.ranks == 1:
            return sum(chunk.stop - chunk.start for chunk in chunks), len(chunks)
        tokens, rows = [0] * self.ranks, [0] * self.ranks
        for request, start, stop, _ in chunks:
            tokens[request.data_rank] += stop - start
            rows[request.data_rank] += 1
        return self.ranks * max(tokens), self.ranks * max(rows)

    def can_verify(self, width: int) -> bool:
        """Whether steps of any rows and sampler can verify drafts of such a width."""
        return not self._buckets or bool(
            self._verifying(self.rows, width, self.sampler)
        )

    def verifier_sizes(self, rows: int, width: int, sampler: str) -> list[int]:
        """Return the tokens of programs that verify drafts of ``rows`` rows, ascending.

        Without programs, powers of two, so that few different steps are compiled.
        """
        if self._buckets:
            fits = self._verifying(rows, width, sampler)
            return sorted({bucket.tokens for bucket in fits if bucket.tokens > rows})
        most = min(self.tokens, rows * width)
        powers = (1 << power for power in range(rows.bit_length(), most.bit_length()))
        return sorted({*(size for size in powers if size > rows), most} - {rows})

    def choose_verifier(
        self, tokens: int, rows: int, width: int, sampler: str
    ) -> Bucket:
        """Return the smallest program that verifies drafts of ``rows`` rows."""
        if not self._buckets:
            return Bucket(
                tokens=tokens, rows=rows, tokens_per_row=width, sampler=sampler
            )
        fits = self._verifying(rows, width, sampler)
        return next(bucket for bucket in fits if bucket.tokens >= tokens)

    def _verifying(self, rows: int, width: int, sampler: str) -> list[Bucket]:
        rank = SAMPLERS.index(sampler)
        return [
            bucket
            for bucket in self._verifiers
            if bucket.rows >= rows
            and bucket.tokens_per_row == width
            and SAMPLERS.index(bucket.sampler) >= rank
        ]

    def choose_repeater(self, rows: int, steps: int, sampler: str) -> Bucket | None:
        """Return the smallest program of ``steps`` or more steps of ``rows`` rows.

        ``None`` if the runner has programs, and none that fits.
        """
        if not self._buckets:
            return Bucket(
                tokens=rows, rows=rows, sampler=sampler, repeat=steps,
                stop_ids=self.stop_ids,
            )  # fmt: skip
        rank = SAMPLERS.index(sampler)
        fits = (
            bucket
            for bucket in self._repeaters
            if bucket.rows >= rows
            and bucket.repeat >= steps
            and SAMPLERS.index(bucket.sampler) >= rank
        )
        return next(fits, None)

    def choose(
        self, tokens: int, rows: int, sampler: str, *, prompts: bool | None = None
    ) -> Bucket:
        """Return the smallest program that fits, or the exact size without programs.

        prompts: whether a row has several tokens; by default if there are more tokens
        than rows.
        """
        if not self._buckets:
            return Bucket(tokens=tokens, rows=rows, sampler=sampler)
        rank = SAMPLERS.index(sampler)
        fits = (
            bucket
            for bucket in self._buckets
            if bucket.tokens >= tokens
            and bucket.rows >= rows
            and SAMPLERS.index(bucket.sampler) >= rank
        )
        smallest = next(fits)
        if tokens == rows and not prompts:
            return smallest
        of_prompts = (
            each for each in chain((smallest,), fits) if each.tokens > each.rows
        )
        return next(of_prompts, smallest)

    def fill(self, tokens: int, rows: int, most: int) -> int:
        """Return the most tokens that a step with prompts should have, of ``most``.

        ``most``, unless so many fewer fill a program that it and the program of the
        rest are smaller together than the next larger one. tokens: all that could be
        computed. rows: those of them that decode, in both steps.
        """
        sizes = [size for size, fits in self._prompts if fits > rows]
        at = bisect_left(sizes, min(tokens, most))
        if not 0 < at < len(sizes):
            return most
        whole, part = sizes[at], sizes[at - 1]
        if tokens > most:  # the rest is computed with what follows
            return part if whole - most > LEAST_STEP else most
        rest = sizes[bisect_left(sizes, tokens - part + rows)]
        return part if part + max(rest, LEAST_STEP) < whole else most


def _size(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.tokens, bucket.rows, SAMPLERS.index(bucket.sampler)


def _verifies(bucket: Bucket) -> bool:
    return bucket.verifies


def _repeats(bucket: Bucket) -> bool:
    return bucket.repeat > 1


def _capacity(bucket: Bucket) -> tuple[int, int]:
    return min(bucket.rows, bucket.tokens), bucket.tokens
