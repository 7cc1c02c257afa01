"""Strict decoder of steps into Python ints, validated word by word against limits.

Compiled runners only use the fast :mod:`inl.protocol.frame_check`. This decoder also
checks order, uniqueness and padding, for :mod:`inl.testing.hash_runner`, replay and
tests. Other frames are decoded in :mod:`inl.protocol.slot_decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from inl.dtypes import widen
from inl.errors import ProtocolError
from inl.protocol.runner import Limits
from inl.spec.embedded_rows import read_inputs
from inl.spec.message import (
    DRAFT,
    EMBEDDED,
    ROW_WORD,
    UPDATE_WORDS,
    BlockTableUpdate,
    Header,
    draft_words,
    layout,
    repeated_uniforms,
    row_words,
    steps_word,
    stop_words,
    uniform_words,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.spec.message import IntArray
    from inl.spec.step import Bucket

ONE = 0x3F800000
"""Bits of 1.0 in float32; the bits of every float in [0, 1) are lower."""


class StepRow(NamedTuple):
    """One sequence's part of a step."""

    slot: int
    tokens: list[int]
    uniforms: list[int]
    """Float32 bits: number ``p % len(uniforms)`` samples position p; in a repeated
    step, number i samples step i."""
    drafts: list[int]
    """Number ``p % len(drafts)`` is drafted for position p."""
    steps: int = 1
    """Steps of a row of a repeated step."""
    stop_ids: tuple[int, ...] = ()
    """Tokens after which a row of a repeated step stops."""


class StepFrame(NamedTuple):
    """A step without its padding."""

    header: Header
    rows: list[StepRow]
    updates: list[BlockTableUpdate]
    embeddings: Mapping[int, NDArray[np.float32]] = MappingProxyType({})
    """[H] each, by index of the token in the step."""
    has_more_inputs: bool = False
    """Whether tokens have positions along axes, spans or features."""

    def kept_embeddings(self, kept: Sequence[bool]) -> dict[int, NDArray[np.float32]]:
        """Return the embeddings in some rows, by index of the token in those rows."""
        pairs = zip(self.rows, kept, strict=True)
        flags = [flag for row, flag in pairs for _ in row.tokens]
        found = self.embeddings.items()
        return {sum(flags[:at]): row for at, row in found if flags[at]}


def read_step(
    frame: IntArray, head: Header, limits: Limits, *, least_rows: int = 1
) -> StepFrame:
    """Decode a step with one sample per row, or one that verifies drafts.

    Checks everything that needs no earlier frame: sizes against the bucket and the
    limits, ids, slots, blocks, uniforms, the order of rows, and zero padding. Raises
    :class:`~inl.errors.ProtocolError`.
    least_rows: 0 where ranks divide the rows, of which one may have none.
    """
    bucket = head.bucket
    if bucket.tokens_per_row != 1 and not bucket.verifies:
        raise _error(
            head, "tokens per row", bucket.tokens_per_row, "1, or one sample per token"
        )
    if limits.buckets and bucket not in limits.buckets:
        programs = f"one of {len(limits.buckets)} programs"
        raise _error(head, "bucket", tuple(bucket), programs)
    if bucket.repeat > 1 and bucket.stop_ids != limits.stop_ids:
        raise _error(head, "stop ids per row", bucket.stop_ids, str(limits.stop_ids))
    place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
    embeddings: dict[int, NDArray[np.float32]] = {}
    has_more = False
    if head.flags & EMBEDDED:
        found = read_inputs(frame, place.size, head.used_tokens, limits)
        embeddings = dict(zip(found.indices.tolist(), widen(found.rows), strict=True))
        has_more = bool(len(found.placed) or found.features.data.any())
        frame = frame[: place.size]
    if len(frame) != place.size:
        raise _error(head, "words", len(frame), str(place.size))
    if head.used_updates > place.max_updates:
        raise _error(
            head, "block table updates", head.used_updates, f"up to {place.max_updates}"
        )
    words = frame.tolist()
    rows = words[place.rows : place.updates]
    updates = words[place.updates : place.tokens]
    tokens = words[place.tokens :]
    for name, part, used in (
        ("rows", rows, row_words(bucket) * head.used_rows),
        ("updates", updates, UPDATE_WORDS * head.used_updates),
        ("tokens", tokens, head.used_tokens),
    ):
        if any(part[used:]):
            raise _error(head, f"padding of {name}", "a nonzero word", "0")
    return StepFrame(
        head,
        _rows(head, rows, tokens, limits, least_rows),
        _updates(head, updates, limits),
        embeddings,
        has_more,
    )


def _rows(
    head: Header, words: Sequence[int], tokens: Sequence[int], limits: Limits,
    least: int,
) -> list[StepRow]:  # fmt: skip
    rows: list[StepRow] = []
    at, bucket = 0, head.bucket
    for index in range(head.used_rows):
        start = row_words(bucket) * index
        record = words[start : start + row_words(bucket)]
        slot, count = record[ROW_WORD.slot], record[ROW_WORD.token_count]
        ids = list(tokens[at : at + count])
        at += count
        row = _row(slot, ids, record, bucket)
        _check_row(head, index, count, row, limits)
        rows.append(row)
    if len(rows) < least or at != head.used_tokens:
        accepted = f"{head.used_tokens}, in at least {least} row"
        raise _error(head, "tokens of all rows", at, accepted)
    if len({row.slot for row in rows}) < len(rows):
        raise _error(head, "slots", [row.slot for row in rows], "each slot once")
    return rows


def _row(slot: int, ids: list[int], record: Sequence[int], bucket: Bucket) -> StepRow:
    if bucket.repeat == 1:
        uniforms = list(record[uniform_words(bucket)])
        return StepRow(slot, ids, uniforms, list(record[draft_words(bucket)]))
    stops = tuple(word - 1 for word in record[stop_words(bucket)] if word)
    uniforms = list(record[repeated_uniforms(bucket)])
    return StepRow(slot, ids, uniforms, [], record[steps_word(bucket)], stops)


def _check_row(
    head: Header, index: int, count: int, row: StepRow, limits: Limits
) -> None:
    where, ids = f"row {index}", row.tokens
    if not 0 < row.slot < limits.slots:
        raise _error(head, f"{where}, slot", row.slot, f"1 to {limits.slots - 1}")
    if head.bucket.verifies:
        _check_drafts(head, where, row, limits)
    elif count < 1 or (count > 1 and index < head.decode_rows):
        accepted = "1, or more after the decoding rows"
        raise _error(head, f"{where}, tokens", count, accepted)
    if not 1 <= row.steps <= head.bucket.repeat:
        raise _error(head, f"{where}, steps", row.steps, f"1 to {head.bucket.repeat}")
    if not all(0 <= token < limits.vocab for token in row.stop_ids):
        accepted = f"0 to {limits.vocab - 1}"
        raise _error(head, f"{where}, stop ids", row.stop_ids, accepted)
    if not all(0 <= number < ONE for number in row.uniforms):
        raise _error(head, f"{where}, bits of uniforms", row.uniforms, "[0, 1)")
    # Only the first token can be the slot's last: later ones are not sampled yet.
    least = DRAFT if head.bucket.verifies else 0
    if ids and not (ids[0] >= -1 and (count == 1 or min(ids[1:]) >= least)):
        accepted = "ids, or -1 as the first"
        raise _error(head, f"{where}, least token", min(ids), accepted)
    if ids and max(ids) >= limits.vocab:
        raise _error(head, f"{where}, token", max(ids), f"up to {limits.vocab - 1}")


def _check_drafts(head: Header, where: str, row: StepRow, limits: Limits) -> None:
    most = head.tokens_per_row
    if head.decode_rows != head.used_rows:
        rows = f"{head.used_rows}, all rows of a step that verifies drafts"
        raise _error(head, "decoding rows", head.decode_rows, rows)
    if not 1 <= len(row.tokens) <= most:
        raise _error(head, f"{where}, tokens", len(row.tokens), f"1 to {most}")
    if any(token != DRAFT for token in row.tokens[1:]):
        accepted = f"{DRAFT} after the first"
        raise _error(head, f"{where}, tokens", row.tokens, accepted)
    if not all(0 <= token < limits.vocab for token in row.drafts):
        raise _error(head, f"{where}, drafts", row.drafts, f"0 to {limits.vocab - 1}")


def _updates(
    head: Header, words: Sequence[int], limits: Limits
) -> list[BlockTableUpdate]:
    starts = range(0, UPDATE_WORDS * head.used_updates, UPDATE_WORDS)
    updates = [BlockTableUpdate(*words[at : at + UPDATE_WORDS]) for at in starts]
    for update in updates:
        if not (
            0 <= update.group < limits.groups
            and 0 < update.slot < limits.slots
            and 0 <= update.entry < limits.max_blocks_per_seq
            and _is_block(update.block, update.group, limits)
        ):
            accepted = (
                f"group 0 to {limits.groups - 1}, slot 1 to {limits.slots - 1}, "
                f"entry 0 to {limits.max_blocks_per_seq - 1}, a block of the group"
            )
            raise _error(head, "block table update", tuple(update), accepted)
    return updates


def _is_block(block: int, group: int, limits: Limits) -> bool:
    """Whether a table may hold this block; 0 only before a group's window."""
    windowed = bool(limits.windows) and limits.windows[group] is not None
    return (0 if windowed else 1) <= block < limits.blocks[group]


def _error(head: Header, what: str, value: object, accepted: str) -> ProtocolError:
    return ProtocolError(f"step {head.step}, {what}: found {value}, accepts {accepted}")
