"""Single frames for a runner: an admission, a step, and one greedy answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.spec.message import BlockTableUpdate, Row, admit_frame, step_frame
from inl.spec.step import SAMPLERS, Bucket

if TYPE_CHECKING:
    from inl.protocol.runner import Limits, Runner
    from inl.spec.message import IntArray

RowPart = tuple[int, list[int]] | tuple[int, list[int], float]
"""Slot, tokens (-1 is the last sampled one), and optionally a uniform number."""


def admission(
    limits: Limits, slot: int, blocks: Sequence[int], *, temperature: float = 0.0
) -> IntArray:
    """Return an admission with the same blocks in every group and nothing cached."""
    tables = [list(blocks)] * limits.groups
    groups, width = limits.groups, limits.max_blocks_per_seq
    return admit_frame(
        slot, tables, groups=groups, max_blocks_per_seq=width, temperature=temperature
    )


def one_step(
    limits: Limits,
    parts: Sequence[RowPart],
    *,
    step: int,
    decoding: int,
    sampler: str = "greedy",
    flags: int = 0,
    updates: Sequence[BlockTableUpdate] = (),
    padding: tuple[int, int] = (0, 0),
) -> IntArray:
    """Return a step in the smallest bucket; ``padding`` adds tokens and rows."""
    tokens = sum(len(part[1]) for part in parts) + padding[0]
    bucket = fitting(limits, tokens, len(parts) + padding[1], sampler)
    return step_frame(
        bucket,
        [Row(part[0], part[1], part[2:]) for part in parts],
        updates,
        step=step,
        groups=limits.groups,
        block_size=limits.block_size,
        decode_rows=decoding,
        flags=flags,
    )


def fitting(limits: Limits, tokens: int, rows: int, sampler: str) -> Bucket:
    """Return the smallest bucket that fits, or the exact size if all are served."""
    if not limits.buckets:
        return Bucket(tokens=tokens, rows=rows, sampler=sampler)
    rank = SAMPLERS.index(sampler)
    fits = [
        bucket
        for bucket in limits.buckets
        if bucket.tokens >= tokens
        and bucket.rows >= rows
        and bucket.reply_width == 1
        and SAMPLERS.index(bucket.sampler) >= rank
    ]
    return min(fits, key=lambda b: (b.tokens, b.rows, SAMPLERS.index(b.sampler)))


def most_tokens(limits: Limits, wanted: int) -> int:
    """Return ``wanted``, or the tokens of the largest bucket if those are fewer."""
    return min(wanted, max((b.tokens for b in limits.buckets), default=wanted))


def most_rows(limits: Limits, wanted: int, tokens: int = 1) -> int:
    """Return ``wanted``, or the rows of the largest bucket if those are fewer.

    tokens: those of the step, which the bucket must hold.
    """
    fits = (b.rows for b in limits.buckets if b.tokens >= tokens)
    return min(wanted, max(fits, default=wanted))


def answer_alone(
    runner: Runner,
    prompt: Sequence[int],
    count: int,
    *,
    chunks: Sequence[int],
    blocks: Sequence[int],
    padding: tuple[int, int] = (0, 0),
) -> list[int]:
    """Compute a prompt in ``chunks`` and return ``count`` greedy tokens."""
    limits = runner.limits
    runner.submit(admission(limits, 1, blocks))
    answer: list[int] = []
    done = 0
    for step, size in enumerate((*chunks, *[1] * (count - 1)), start=1):
        prompting = done < len(prompt)
        tokens = list(prompt[done : done + size]) if prompting else [-1]
        done += len(tokens)
        frame = one_step(
            limits, [(1, tokens)], step=step, decoding=0 if prompting else 1,
            padding=padding,
        )  # fmt: skip
        runner.submit(frame)
        token = int(runner.collect().tokens[0, 0])
        if done >= len(prompt):
            answer.append(token)
    return answer
