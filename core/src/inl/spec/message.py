"""Frames: the int32 arrays that carry everything from an engine to a runner.

A frame is a header of :data:`HEADER` words (:class:`Header`) and a body. The body of a
step is, in order::

    rows     [R, ...]    slot, count, float32 bits of U uniform numbers, U - 1 drafted
                         tokens; or slot, 1, bits of N uniform numbers, number of
                         steps, K stop ids plus 1
    updates  [C, 4]      changed block table entries: group, slot, entry, block
    tokens   [T]         ids; -1 is the slot's last sampled token, -2 the drafted token
                         of the position that it is computed at

with the flag EMBEDDED followed by embeddings (:mod:`inl.spec.embedded_rows`), and
with ``C = max_block_table_updates(bucket)``. U is ``2 * W - 1`` and K is 8, unless the
header has other numbers. Uniform numbers and drafts belong to positions, because the
engine does not know where a row starts while a step that verifies drafts is in flight:
position p of the row's sequence is sampled with number ``p % U`` and has draft
``p % (U - 1)``.

A repeated step has no flags and no drafts, and its reply has tokens only: rows that
sample under a mask, or report log-probabilities, are decoded one step at a time. A
repeated step with a flag is refused by the name of the word.

Step i of a repeated step (``Header.repeat`` is N) samples with uniform number i, and
has the token that step i - 1 sampled as its input. A row computes as many steps as its
words say, and none after a sampled token that is one of its stop ids or invalid. That
includes the token before the first step, if the row feeds it back: a row that has
stopped while the frame was on its way computes nothing.

A step with the flag POOLED samples nothing: the reply has the hidden state of the last
token of each row, as the model's head reads it.

The body of an
admission is slot, length (tokens whose keys and values are already in the given
blocks), last token, adapter,
the float32 bits of :data:`~inl.spec.step.PARAMS`, and the block table ``[G, B]``. A
release has only the slot. Token bias frames follow the admission of a sequence with
penalties or biased tokens: slot, number of entries, then ``[MAX_TOKEN_BIASES, 3]``:
token, count (as in ``Tables.token_counts``), float32 bits of the bias. Several of them
add up; each names a token once.

READ and WRITE frames copy contents of the cache to and from the host, in the order of
steps: cache group (-1: the state of a slot), number of blocks, then
:data:`MAX_TRANSFER` block ids, or the slot. The contents
(:mod:`inl.spec.cache_layout`) travel beside the frames.

Padding is zeros: slot 0 and block 0 belong to no sequence, and an entry of zeros adds
nothing. The positions of all words are in :mod:`inl.spec.message_header` and
:mod:`inl.spec.message_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.errors import ProtocolError
from inl.spec.message_header import ADMIT as ADMIT
from inl.spec.message_header import EMBEDDED as EMBEDDED
from inl.spec.message_header import HALVED as HALVED
from inl.spec.message_header import HEADER as HEADER
from inl.spec.message_header import HEADER_WORD as HEADER_WORD
from inl.spec.message_header import INT32 as INT32
from inl.spec.message_header import MASKED as MASKED
from inl.spec.message_header import POOLED as POOLED
from inl.spec.message_header import READ as READ
from inl.spec.message_header import RELEASE as RELEASE
from inl.spec.message_header import SCORED as SCORED
from inl.spec.message_header import STEP as STEP
from inl.spec.message_header import STEP_NUMBERS as STEP_NUMBERS
from inl.spec.message_header import TOKEN_BIAS as TOKEN_BIAS
from inl.spec.message_header import USED_COUNTS as USED_COUNTS
from inl.spec.message_header import VERSION as VERSION
from inl.spec.message_header import WRITE as WRITE
from inl.spec.message_header import Header as Header
from inl.spec.message_header import header as header
from inl.spec.message_layout import ADMISSION_WORD as ADMISSION_WORD
from inl.spec.message_layout import BIAS_WORD as BIAS_WORD
from inl.spec.message_layout import BIAS_WORDS as BIAS_WORDS
from inl.spec.message_layout import DRAFT as DRAFT
from inl.spec.message_layout import FEEDBACK as FEEDBACK
from inl.spec.message_layout import MAX_TOKEN_BIASES as MAX_TOKEN_BIASES
from inl.spec.message_layout import MAX_TRANSFER as MAX_TRANSFER
from inl.spec.message_layout import ROW_WORD as ROW_WORD
from inl.spec.message_layout import TOKEN_BIAS_SIZE as TOKEN_BIAS_SIZE
from inl.spec.message_layout import TOKEN_BIAS_WORD as TOKEN_BIAS_WORD
from inl.spec.message_layout import TRANSFER_SIZE as TRANSFER_SIZE
from inl.spec.message_layout import TRANSFER_WORD as TRANSFER_WORD
from inl.spec.message_layout import UPDATE_WORD as UPDATE_WORD
from inl.spec.message_layout import UPDATE_WORDS as UPDATE_WORDS
from inl.spec.message_layout import BlockTableUpdate as BlockTableUpdate
from inl.spec.message_layout import Layout as Layout
from inl.spec.message_layout import Row as Row
from inl.spec.message_layout import TokenBias as TokenBias
from inl.spec.message_layout import admit_size as admit_size
from inl.spec.message_layout import draft_words as draft_words
from inl.spec.message_layout import layout as layout
from inl.spec.message_layout import max_block_table_updates as max_block_table_updates
from inl.spec.message_layout import repeated_uniforms as repeated_uniforms
from inl.spec.message_layout import row_words as row_words
from inl.spec.message_layout import steps_word as steps_word
from inl.spec.message_layout import stop_words as stop_words
from inl.spec.message_layout import uniform_count as uniform_count
from inl.spec.message_layout import uniform_words as uniform_words
from inl.spec.step import MAX_STOP_IDS as MAX_STOP_IDS
from inl.spec.step import NEUTRAL, PARAMS, SAMPLERS, Bucket

if TYPE_CHECKING:
    from inl.spec.message_layout import IntArray as IntArray


def step_frame(
    bucket: Bucket,
    rows: Sequence[Row],
    updates: Sequence[BlockTableUpdate] = (),
    *,
    step: int,
    groups: int,
    block_size: int,
    decode_rows: int,
    flags: int = 0,
) -> IntArray:
    """Return the frame of one step; its ``decode_rows`` decoding rows come first.

    Raises :class:`ProtocolError` where rows, tokens or updates exceed the bucket.
    """
    import numpy as np

    place = layout(bucket, groups=groups, block_size=block_size)
    counts = [len(row.tokens) for row in rows]
    used_tokens = sum(counts)
    _check_fits("rows", len(rows), bucket.rows)
    _check_fits("tokens", used_tokens, bucket.tokens)
    _check_fits("block table updates", len(updates), place.max_updates)
    frame = np.zeros(place.size, np.int32)
    repeats = bucket.repeat > 1
    frame[: len(Header._fields)] = Header(
        VERSION, STEP, step, bucket.tokens, bucket.rows, bucket.tokens_per_row,
        SAMPLERS.index(bucket.sampler), flags, bucket.repeat if repeats else 0,
        decode_rows, len(rows), used_tokens, len(updates),
        bucket.stop_ids if repeats and bucket.stop_ids != MAX_STOP_IDS else 0,
        bucket.uniforms,
    )  # fmt: skip
    _write_rows(frame[place.rows : place.updates], rows, counts, bucket)
    _write_tokens(frame[place.tokens :], rows, counts)
    if updates:
        stop = place.updates + UPDATE_WORDS * len(updates)
        frame[place.updates : stop] = np.array(updates, np.int32).ravel()
    return frame


def _write_rows(
    words: IntArray, rows: Sequence[Row], counts: Sequence[int], bucket: Bucket
) -> None:
    import numpy as np

    table = words.reshape(bucket.rows, -1)[: len(rows)]
    table[:, ROW_WORD.slot] = [row.slot for row in rows]
    table[:, ROW_WORD.token_count] = counts
    if any(row.uniforms for row in rows):
        words_of = uniform_words if bucket.repeat == 1 else repeated_uniforms
        place = words_of(bucket)
        missing = (0.0,) * (place.stop - place.start)
        uniforms = [(*row.uniforms, *missing)[: len(missing)] for row in rows]
        table[:, place] = np.array(uniforms, np.float32).view(np.int32)
    if bucket.repeat > 1:
        _write_repeats(table, rows, bucket)
    if bucket.tokens_per_row > 1:
        drafts = table[:, draft_words(bucket)]
        for row, words_of_row in zip(rows, drafts, strict=True):
            words_of_row[: len(row.drafts)] = row.drafts


def _write_repeats(table: IntArray, rows: Sequence[Row], bucket: Bucket) -> None:
    """Write the number of steps and the stop ids of rows of a repeated step."""
    table[:, steps_word(bucket)] = [row.steps for row in rows]
    for row, words in zip(rows, table[:, stop_words(bucket)], strict=True):
        _check_fits("stop ids of a row", len(row.stop_ids), bucket.stop_ids)
        words[: len(row.stop_ids)] = [token + 1 for token in row.stop_ids]


def _write_tokens(words: IntArray, rows: Sequence[Row], counts: Sequence[int]) -> None:
    # Rows of a single token come first in a step and are written in one assignment.
    at = next((i for i, count in enumerate(counts) if count != 1), len(rows))
    words[:at] = [row.tokens[0] for row in rows[:at]]
    for row in rows[at:]:
        words[at : at + len(row.tokens)] = row.tokens
        at += len(row.tokens)


def admit_frame(
    slot: int,
    blocks: Sequence[Sequence[int]],
    *,
    groups: int,
    max_blocks_per_seq: int,
    length: int = 0,
    last: int = 0,
    adapter: int = 0,
    **params: float,
) -> IntArray:
    """Return a frame that assigns ``slot`` to a sequence.

    blocks: block ids of each cache group; they hold the keys and values of the first
    ``length`` tokens. params: by the names of :data:`~inl.spec.step.PARAMS`; missing
    ones are neutral. Raises :class:`ProtocolError` for unknown names and for more
    groups or blocks than the frame holds.
    """
    import numpy as np

    frame = _admission(ADMIT, slot, groups, max_blocks_per_seq)
    at = ADMISSION_WORD
    frame[at.length : at.params] = length, last, adapter
    if unknown := sorted(set(params) - set(PARAMS)):
        raise ProtocolError(f"params: found {unknown}, accepts {', '.join(PARAMS)}")
    neutral = zip(PARAMS, NEUTRAL, strict=True)
    values = [params.get(name, value) for name, value in neutral]
    frame[at.params : at.blocks] = np.asarray(values, np.float32).view(np.int32)
    table = frame[at.blocks :].reshape(groups, max_blocks_per_seq)
    _check_fits("cache groups", len(blocks), groups)
    for group, ids in enumerate(blocks):
        _check_fits("blocks of a sequence", len(ids), max_blocks_per_seq)
        table[group, : len(ids)] = ids
    return frame


def release_frame(slot: int, *, groups: int, max_blocks_per_seq: int) -> IntArray:
    """Return a frame that frees ``slot``; its block table becomes zeros."""
    return _admission(RELEASE, slot, groups, max_blocks_per_seq)


def _admission(kind: int, slot: int, groups: int, max_blocks_per_seq: int) -> IntArray:
    import numpy as np

    frame = np.zeros(admit_size(groups, max_blocks_per_seq), np.int32)
    frame[HEADER_WORD.version] = VERSION
    frame[HEADER_WORD.kind] = kind
    frame[ADMISSION_WORD.slot] = slot
    return frame


def token_bias_frame(slot: int, biases: Sequence[TokenBias]) -> IntArray:
    """Return a frame with counts and biases of tokens of the sequence in ``slot``.

    Raises :class:`ProtocolError` for more than :data:`MAX_TOKEN_BIASES` entries.
    """
    import numpy as np

    _check_fits("token biases", len(biases), MAX_TOKEN_BIASES)
    frame = np.zeros(TOKEN_BIAS_SIZE, np.int32)
    frame[HEADER_WORD.version] = VERSION
    frame[HEADER_WORD.kind] = TOKEN_BIAS
    frame[TOKEN_BIAS_WORD.slot] = slot
    frame[TOKEN_BIAS_WORD.used] = len(biases)
    if biases:
        entries = frame[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
        entries = entries[: len(biases)]
        entries[:, BIAS_WORD.token] = [each.token for each in biases]
        entries[:, BIAS_WORD.token_count] = [each.token_count for each in biases]
        bits = np.array([each.bias for each in biases], np.float32).view(np.int32)
        entries[:, BIAS_WORD.bias] = bits
    return frame


def transfer_frame(kind: int, group: int, ids: Sequence[int]) -> IntArray:
    """Return a READ or WRITE frame of blocks of a cache group, or of one slot.

    Raises :class:`ProtocolError` for more than :data:`MAX_TRANSFER` blocks.
    """
    import numpy as np

    _check_fits("blocks", len(ids), MAX_TRANSFER)
    frame = np.zeros(TRANSFER_SIZE, np.int32)
    frame[HEADER_WORD.version] = VERSION
    frame[HEADER_WORD.kind] = kind
    frame[TRANSFER_WORD.group] = group
    frame[TRANSFER_WORD.used] = len(ids)
    frame[TRANSFER_WORD.ids :][: len(ids)] = ids
    return frame


def transferred(frame: IntArray) -> tuple[int, list[int]]:
    """Return the cache group, and the blocks or the slot, of a READ or WRITE frame."""
    group, count = frame[TRANSFER_WORD.group : TRANSFER_WORD.ids].tolist()
    return group, frame[TRANSFER_WORD.ids :][:count].tolist()


def _check_fits(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ProtocolError(f"{what}: found {count}, the frame holds {limit}")
