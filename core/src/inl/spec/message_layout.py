"""Bodies of the int32 frames of :mod:`inl.spec.message`: records and positions.

Writers and parsers index frames with the ``*_WORD`` constants and with :func:`layout`.
Each constant is the record's tuple with positions as values: ``UPDATE_WORD.block`` is
the index of the block id within a block table update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from inl.spec.message_header import HEADER
from inl.spec.step import Bucket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int32]

MAX_TOKEN_BIASES = 256
"""Most tokens in one token bias frame."""

MAX_TRANSFER = 16
"""Most blocks of a READ or WRITE frame."""


class Row(NamedTuple):
    """One sequence's part of a step, as a writer receives it."""

    slot: int
    tokens: Sequence[int] | IntArray
    """Ids to compute; -1 is the slot's last sampled token, -2 the drafted token of the
    position that it is computed at."""
    uniforms: Sequence[float] = ()
    """In [0, 1): number ``p % U`` samples position p; missing ones are 0."""
    drafts: Sequence[int] = ()
    """Number ``p % (U - 1)`` is drafted for position p; missing ones are 0."""
    steps: int = 1
    """Steps of a row of a repeated step, which has a uniform number for each."""
    stop_ids: Sequence[int] = ()
    """Sampled tokens after which a row of a repeated step computes nothing more."""


FEEDBACK = (-1,)
"""Tokens of a decoding row: the token that the runner sampled last."""

DRAFT = -2
"""A token of a row: the drafted one of its position."""


class RowWords(NamedTuple):
    """One row of a step frame: 1 + 2 * U words, or 3 + N + K of repeated steps.

    With U, the uniform numbers of a row (:func:`uniform_count`: ``2 * W - 1``, unless
    the header has another number), and K, its stop ids (:attr:`Bucket.stop_ids`).
    """

    slot: int
    token_count: int
    """Tokens of the row; 0 is padding."""
    uniforms: int
    """Float32 bits of the first of U uniform numbers, which U - 1 drafted tokens
    follow. Of repeated steps: of the first of N uniform numbers, which the number of
    steps of the row and K words follow, each a stop id plus 1, or 0."""


class BlockTableUpdate(NamedTuple):
    """One changed entry of a block table."""

    group: int
    slot: int
    entry: int
    """Index into the slot's table."""
    block: int


class AdmissionWords(NamedTuple):
    """Body of an admission. A release has only the slot, and zeros elsewhere."""

    slot: int
    length: int
    """Tokens whose keys and values are already in the given blocks."""
    last: int
    """The token that -1 stands for in the first step."""
    adapter: int
    params: int
    """Float32 bits of the first of :data:`~inl.spec.step.PARAMS`."""
    blocks: int
    """First word of the block table [G, B]."""


class TokenBiasWords(NamedTuple):
    """Body of a token bias frame."""

    slot: int
    used: int
    """Entries in use."""
    entries: int
    """First word of :data:`MAX_TOKEN_BIASES` entries."""


class TransferWords(NamedTuple):
    """Body of a READ or WRITE frame."""

    group: int
    """Cache group; -1: the state of a slot."""
    used: int
    """Number of blocks; 1 of a slot."""
    ids: int
    """First of :data:`MAX_TRANSFER` block ids; the slot."""


class BiasWords(NamedTuple):
    """One entry of a token bias frame."""

    token: int
    token_count: int
    bias: int
    """Float32 bits."""


class TokenBias(NamedTuple):
    """Occurrences and logit bias of one token of a sequence."""

    token: int
    token_count: int = 0
    """Twice the occurrences in the answer, plus 1 if the token is in the prompt."""
    bias: float = 0.0
    """Added to the token's logit."""


ROW_WORD = RowWords(*range(len(RowWords._fields)))
"""Word of each field within a row of a step frame."""

UPDATE_WORD = BlockTableUpdate(*range(len(BlockTableUpdate._fields)))
"""Word of each field within a block table update."""

UPDATE_WORDS = len(UPDATE_WORD)
"""Words of a block table update."""

ADMISSION_WORD = AdmissionWords(
    slot=HEADER,
    length=HEADER + 1,
    last=HEADER + 2,
    adapter=HEADER + 3,
    params=HEADER + 4,
    blocks=HEADER + 11,
)
"""Word of each field from the start of an admission or a release."""

TOKEN_BIAS_WORD = TokenBiasWords(*range(HEADER, HEADER + len(TokenBiasWords._fields)))
"""Word of each field from the start of a token bias frame."""

BIAS_WORD = BiasWords(*range(len(BiasWords._fields)))
"""Word of each field within an entry of a token bias frame."""

BIAS_WORDS = len(BIAS_WORD)
"""Words of an entry of a token bias frame."""

TOKEN_BIAS_SIZE = TOKEN_BIAS_WORD.entries + BIAS_WORDS * MAX_TOKEN_BIASES
"""Words of a token bias frame."""

TRANSFER_WORD = TransferWords(*range(HEADER, HEADER + len(TransferWords._fields)))
"""Word of each field from the start of a READ or WRITE frame."""

TRANSFER_SIZE = TRANSFER_WORD.ids + MAX_TRANSFER
"""Words of a READ or WRITE frame."""


class Layout(NamedTuple):
    """Start of each part of a step frame, in words."""

    rows: int
    updates: int
    tokens: int
    size: int

    @property
    def max_updates(self) -> int:
        """Block table updates that fit into the frame."""
        return (self.tokens - self.updates) // UPDATE_WORDS


def uniform_count(bucket: Bucket) -> int:
    """Return the uniform numbers of a row of a step frame.

    A row that samples up to W positions starts at one of W, since a step in flight may
    accept 1 to W tokens: it may sample ``2 * W - 1`` different positions. A bucket may
    have room for more.
    """
    return bucket.uniforms or 2 * bucket.tokens_per_row - 1


def draft_words(bucket: Bucket) -> slice:
    """Return the drafted tokens within a row of a step frame."""
    count = uniform_count(bucket)
    start = ROW_WORD.uniforms + count
    return slice(start, start + count - 1)


def uniform_words(bucket: Bucket) -> slice:
    """Return the uniform numbers within a row of a step frame."""
    return slice(ROW_WORD.uniforms, ROW_WORD.uniforms + uniform_count(bucket))


def repeated_uniforms(bucket: Bucket) -> slice:
    """Return the uniform numbers of all steps within a row of a repeated step."""
    return slice(ROW_WORD.uniforms, ROW_WORD.uniforms + bucket.repeat)


def steps_word(bucket: Bucket) -> int:
    """Return the number of steps within a row of a repeated step."""
    return ROW_WORD.uniforms + bucket.repeat


def stop_words(bucket: Bucket) -> slice:
    """Return the stop ids within a row of a repeated step."""
    start = steps_word(bucket) + 1
    return slice(start, start + bucket.stop_ids)


def row_words(bucket: Bucket) -> int:
    """Return the words of one row of a step frame."""
    if bucket.repeat > 1:
        return steps_word(bucket) + 1 + bucket.stop_ids
    return ROW_WORD.uniforms + 2 * uniform_count(bucket) - 1


def max_block_table_updates(bucket: Bucket, *, groups: int, block_size: int) -> int:
    """Return the most block table updates that one step of ``bucket`` can have."""
    return groups * (bucket.rows + bucket.tokens * bucket.repeat // block_size)


def layout(bucket: Bucket, *, groups: int, block_size: int) -> Layout:
    """Return the positions of the parts of a step frame of ``bucket``."""
    updates = HEADER + bucket.rows * row_words(bucket)
    tokens = updates + UPDATE_WORDS * max_block_table_updates(
        bucket, groups=groups, block_size=block_size
    )
    return Layout(HEADER, updates, tokens, tokens + bucket.tokens)


def admit_size(groups: int, max_blocks_per_seq: int) -> int:
    """Return the words of an admission or a release."""
    return ADMISSION_WORD.blocks + groups * max_blocks_per_seq
