"""Measures the times of steps by their number of tokens, for speculation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np

from inl.protocol.runner import Limits, Runner
from inl.scheduling.buckets import Buckets
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.speculation.draft_counts import StepTimes, never_falling

SECONDS = 2.0
"""After this time of timed steps, no more steps of several rows are measured."""

RUNS = 2
"""Least timed runs of each step; the fastest counts."""

STEP_SECONDS = 0.05
"""A step is timed for this time, but at most :data:`MOST_RUNS` times."""

MOST_RUNS = 10

IN_FLIGHT = 8
"""Steps whose mean time is taken where others are in flight."""

PROMPT = 64
"""Tokens of a timed prompt."""

GROWTH = 4
"""Ratio of the rows of steps without drafts that are measured."""


def measure_step_times(
    runner: Runner, max_rows: int, *, width: int,
    read_taps: Callable[[bool], object] | None = None,
) -> StepTimes:  # fmt: skip
    """Time steps of one token per row, and steps that verify drafts, on an idle runner.

    width: most tokens of a row. Steps of one row are always measured, larger ones for
    about :data:`SECONDS` seconds. read_taps: of a runner whose verifying steps are read
    by a draft head, and alone: called before each with whether it verifies drafts. The
    runner is reset afterwards.
    """
    verifying: dict[int, float] = {}
    plain: dict[int, float] = {}
    spent = 0.0
    for bucket in _steps(runner.limits, max_rows, width):
        if bucket.tokens > width and spent > SECONDS:
            continue
        if read_taps is not None:
            read_taps(bucket.verifies)
        seconds = _time(runner, bucket)
        if read_taps is not None and not bucket.verifies:
            seconds = min(seconds, _time_in_flight(runner, bucket))
        spent += RUNS * seconds
        (verifying if bucket.verifies else plain)[bucket.tokens] = seconds
    runner.reset()
    plain = never_falling(plain)
    if not verifying:
        return StepTimes(plain, plain)
    # A step of drafts takes no less than one of as many rows.
    known = StepTimes(never_falling(verifying))
    for tokens in plain.keys() - verifying.keys():
        if tokens > min(known.seconds):
            verifying[tokens] = max(plain[tokens], known.at(tokens))
    return StepTimes(never_falling(verifying), plain)


def measure_token_seconds(runner: Runner) -> float:
    """Time a token of a prompt of :data:`PROMPT` tokens on an idle runner.

    The runner is reset afterwards.
    """
    limits = runner.limits
    ranks = limits.data_ranks
    count = min(PROMPT, limits.token_budget // ranks, limits.max_tokens)
    buckets = Buckets(limits, token_budget=limits.token_budget, max_rows=ranks)
    seconds = _time(runner, buckets.choose(ranks * count, ranks, "greedy"), count)
    runner.reset()
    return seconds / count


def _steps(limits: Limits, max_rows: int, width: int) -> Iterator[Bucket]:
    """Yield steps without drafts and steps that verify them, by size."""
    buckets = Buckets(limits, token_budget=limits.token_budget, max_rows=max_rows)
    ranks = limits.data_ranks

    def equal(count: int) -> int:
        """Return a count of which each rank that divides the rows has a part."""
        return -(-count // ranks) * ranks

    counts = [1]
    while counts[-1] * GROWTH < max_rows:
        counts.append(counts[-1] * GROWTH)
    plain = [
        buckets.choose(count, count, "greedy")
        for count in sorted({*map(equal, (*counts, max_rows))})
    ]
    sizes = {
        min(equal(size), rows * width): rows
        for rows in (equal(max_rows), equal(1))
        for size in buckets.verifier_sizes(rows, width, "greedy")
    }
    verifying = [
        buckets.choose_verifier(size, sizes[size], width, "greedy") for size in sizes
    ]
    yield from sorted({*plain, *verifying})


def _time(runner: Runner, bucket: Bucket, prompt: int = 0) -> float:
    """Return the least seconds of a step of one prompt, or whose rows share its tokens.

    prompt: tokens of the prompt.
    """
    counts = [len(part) for part in np.array_split(range(bucket.tokens), bucket.rows)]
    counts = [min(count, runner.limits.max_tokens) for count in counts if count]
    if prompt:
        counts = [prompt]
    least, spent = float("inf"), 0.0
    for run in range(MOST_RUNS + 1):  # the first one compiles the step
        if run > RUNS and spent > STEP_SECONDS:
            break
        runner.reset()
        for frame in _admissions(runner.limits, len(counts)):
            runner.submit(frame)
        frame = _step(runner.limits, bucket, counts, 0 if prompt else len(counts))
        began = perf_counter()
        runner.submit(frame)
        runner.collect()
        least = min(least, perf_counter() - began)
        spent += perf_counter() - began if run else 0
    return least


def _time_in_flight(runner: Runner, bucket: Bucket) -> float:
    """Return the seconds of a step of one token per row, with others in flight."""
    limits = runner.limits
    if limits.depth == 1 or limits.max_tokens < IN_FLIGHT + limits.depth:
        return float("inf")
    runner.reset()
    for frame in _admissions(limits, bucket.rows):
        runner.submit(frame)
    frame = _step(limits, bucket, [1] * bucket.rows, bucket.rows)
    for _ in range(limits.depth - 1):
        runner.submit(frame)
    began = perf_counter()
    for _ in range(IN_FLIGHT):
        runner.submit(frame)
        runner.collect()
    seconds = (perf_counter() - began) / IN_FLIGHT
    for _ in range(limits.depth - 1):
        runner.collect()
    return seconds


def _admissions(limits: Limits, rows: int) -> Iterator[np.ndarray]:
    """Yield admissions whose sequences all write to the first blocks."""
    blocks = range(1, 1 + min(limits.max_blocks_per_seq, min(limits.blocks) - 1))
    for slot in range(1, rows + 1):
        yield admit_frame(
            slot, [list(blocks)] * limits.groups, groups=limits.groups,
            max_blocks_per_seq=limits.max_blocks_per_seq,
        )  # fmt: skip


def _step(
    limits: Limits, bucket: Bucket, counts: list[int], decode_rows: int
) -> np.ndarray:
    ids = [token % limits.vocab for token in range(max(counts))]
    rows = [Row(slot, ids[:count]) for slot, count in enumerate(counts, start=1)]
    return step_frame(
        bucket, rows, step=0, groups=limits.groups, block_size=limits.block_size,
        decode_rows=decode_rows,
    )  # fmt: skip
