"""Division of frames and replies among ranks that divide the rows of a step.

The sequence in slot s is computed by rank ``(s - 1) % D``, where its slot is
``(s - 1) // D + 1``; see :attr:`~inl.spec.limits.Limits.data_ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.errors import ProtocolError
from inl.protocol.runner import Reply
from inl.spec.message import (
    ADMISSION_WORD,
    ADMIT,
    EMBEDDED,
    HEADER,
    HEADER_WORD,
    RELEASE,
    ROW_WORD,
    SCORED,
    TOKEN_BIAS_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    layout,
    row_words,
)
from inl.spec.step import NO_TOKEN, Scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.spec.limits import Limits
    from inl.spec.message import Header, IntArray


def all_ranks_limits(limits: Limits, ranks: int) -> Limits:
    """Return the limits of a group from those of each rank that divides its rows."""
    buckets = (
        each._replace(tokens=each.tokens * ranks, rows=each.rows * ranks)
        for each in limits.buckets
    )
    return replace(
        limits, slots=(limits.slots - 1) * ranks + 1, buckets=tuple(buckets),
        token_budget=limits.token_budget * ranks, data_ranks=ranks,
    )  # fmt: skip


def one_rank_limits(limits: Limits) -> Limits:
    """Return the limits of each rank of a group: :func:`all_ranks_limits` reversed."""
    ranks = limits.data_ranks
    return replace(
        limits, slots=(limits.slots - 1) // ranks + 1,
        buckets=tuple(each.share(ranks) for each in limits.buckets),
        token_budget=limits.token_budget // ranks, data_ranks=1,
    )  # fmt: skip


def slot_share(message: IntArray, head: Header, ranks: int) -> tuple[int, IntArray]:
    """Return the rank of a slot's frame, such as an admission, and its frame there."""
    known = head.kind in (ADMIT, RELEASE)
    at = ADMISSION_WORD.slot if known else TOKEN_BIAS_WORD.slot
    frame, slot = message.copy(), int(message[at])
    frame[at] = (slot - 1) // ranks + 1
    return (slot - 1) % ranks, frame


class Share(NamedTuple):
    """What one rank computes of a step."""

    frame: IntArray
    rows: NDArray[np.intp]
    """Indices of its rows in the whole step."""
    tokens: NDArray[np.intp]
    """Indices of its tokens in the whole step."""


class StepShares:
    """A step that ranks divide. Raises :class:`~inl.errors.ProtocolError` for one whose
    rows do not fit into the bucket of each rank.
    """

    def __init__(self, message: IntArray, head: Header, limits: Limits) -> None:
        ranks = limits.data_ranks
        self._head, bucket = head, head.bucket
        if bucket.tokens % ranks or bucket.rows % ranks:
            raise ProtocolError(
                f"step {head.step}: found {bucket.tokens} tokens and {bucket.rows} "
                f"rows for {ranks} ranks; accepted: multiples of {ranks}"
            )
        if head.flags & EMBEDDED:
            raise ProtocolError(
                f"step {head.step}: found embeddings; ranks that divide the rows "
                "accept token ids only"
            )
        self.parts = [
            _share(message, head, limits, rank) for rank in range(limits.data_ranks)
        ]

    def masks(self, masks: IntArray) -> list[IntArray]:
        """Return each rank's masks of a step that waits for them."""
        found: list[IntArray] = []
        for part in self.parts:
            mine = masks[part.tokens if self._head.bucket.verifies else part.rows]
            count = self._head.bucket.share(len(self.parts)).samples
            own = np.full((count, masks.shape[1]), -1, np.int32)
            own[: len(mine)] = mine
            found.append(own)
        return found

    def joined(self, replies: Sequence[Reply]) -> Reply:
        """Return the reply of the whole step from one of each rank."""
        head, bucket = self._head, self._head.bucket
        rows = [part.rows for part in self.parts]
        tokens = _joined([r.tokens for r in replies], rows, bucket.rows, NO_TOKEN)
        scores, hidden = None, None
        if replies[0].scores is not None:
            by_token = bucket.verifies or bool(head.flags & SCORED)
            places = [part.tokens for part in self.parts] if by_token else rows
            count = bucket.tokens if by_token else bucket.rows
            each = zip(*(reply.scores or () for reply in replies), strict=True)
            scores = Scores(*(_joined(found, places, count) for found in each))
        states = [reply.hidden for reply in replies if reply.hidden is not None]
        if states:
            hidden = _joined(states, rows, bucket.rows)
        counts = [reply.loads for reply in replies if reply.loads is not None]
        loads = sum(counts[1:], counts[0]) if counts else None
        return Reply(head.step, tokens, scores, hidden, loads)


def _joined(
    parts: Sequence[Any], places: Sequence[NDArray[np.intp]], count: int, empty: int = 0
) -> Any:
    """Return an array of ``count`` rows with the rows of each part at its places."""
    whole = np.full((count, *parts[0].shape[1:]), empty, parts[0].dtype)
    for part, at in zip(parts, places, strict=True):
        whole[at] = part[: len(at)]
    return whole


def _share(message: IntArray, head: Header, limits: Limits, rank: int) -> Share:
    ranks, bucket = limits.data_ranks, head.bucket
    own = bucket.share(ranks)
    sizes = {"groups": limits.groups, "block_size": limits.block_size}
    here, there = layout(bucket, **sizes), layout(own, **sizes)
    rows = message[here.rows : here.updates].reshape(bucket.rows, row_words(bucket))
    rows = rows[: head.used_rows]
    owners = (rows[:, ROW_WORD.slot] - 1) % ranks
    counts = rows[:, ROW_WORD.token_count]
    mine = np.flatnonzero(owners == rank)
    chosen = np.flatnonzero(np.repeat(owners, counts) == rank)
    updates = message[here.updates :][: UPDATE_WORDS * head.used_updates]
    updates = updates.reshape(-1, UPDATE_WORDS)
    updates = updates[(updates[:, UPDATE_WORD.slot] - 1) % ranks == rank]
    for what, found, most in (
        ("rows", len(mine), own.rows),
        ("tokens", len(chosen), own.tokens),
        ("block table updates", len(updates), there.max_updates),
    ):
        if found > most:
            raise ProtocolError(
                f"step {head.step}: found {found} {what} of rank {rank} of {ranks}, "
                f"accepts at most {most}"
            )
    frame = np.zeros(there.size, np.int32)
    frame[:HEADER] = message[:HEADER]
    at = HEADER_WORD
    frame[at.tokens], frame[at.rows] = own.tokens, own.rows
    frame[at.decode_rows] = int((mine < head.decode_rows).sum())
    frame[at.used_rows], frame[at.used_tokens] = len(mine), len(chosen)
    frame[at.used_updates] = len(updates)
    for start, part, slot in (
        (there.rows, rows[mine], ROW_WORD.slot),
        (there.updates, updates, UPDATE_WORD.slot),
    ):
        words = part.copy()
        words[:, slot] = (words[:, slot] - 1) // ranks + 1
        frame[start : start + words.size] = words.ravel()
    frame[there.tokens :][: len(chosen)] = message[here.tokens + chosen]
    return Share(frame, mine, chosen)
