"""The tokens that a step with the SCORED flag computes the scores of.

They are those after each token of the step: the next one of its row, and after the last
one of a row the id that the row's uniform number stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from inl.errors import ProtocolError
from inl.spec.message_header import header
from inl.spec.message_layout import ROW_WORD, layout, uniform_words

if TYPE_CHECKING:
    from inl.spec.message_layout import IntArray
    from inl.spec.step import Array, Bucket

UNIT: Final = 2.0**-24
"""Uniform number of token id 1; float32 has each multiple below 1."""


def as_uniform(token: int) -> float:
    """Return the number in [0, 1) that stands for a token id below 2**24."""
    return token * UNIT


def next_tokens(
    frame: IntArray, *, groups: int, block_size: int, vocab: int
) -> IntArray:
    """Return the token after each one of a step, int32 [T]; 0 after padding.

    Raises :class:`~inl.errors.ProtocolError` for one outside the vocabulary.
    """
    import numpy as np

    head = header(frame)
    bucket = head.bucket
    place = layout(bucket, groups=groups, block_size=block_size)
    rows = frame[place.rows : place.updates].reshape(bucket.rows, -1)[: head.used_rows]
    tokens = frame[place.tokens : place.tokens + bucket.tokens]
    found = np.zeros(bucket.tokens, np.int32)
    found[: head.used_tokens][:-1] = tokens[1 : head.used_tokens]
    numbers = np.ascontiguousarray(rows[:, uniform_words(bucket)][:, 0])
    ends = rows[:, ROW_WORD.token_count].cumsum() - 1
    found[ends] = (numbers.view(np.float32) / np.float32(UNIT)).astype(np.int32)
    if found.min(initial=0) < 0 or found.max(initial=0) >= vocab:
        bad = next(t for t in found.tolist() if not 0 <= t < vocab)
        raise ProtocolError(
            f"step {head.step}: found token {bad} to be scored, accepts 0 to "
            f"{vocab - 1}"
        )
    return found


def with_next(frame: IntArray, *, groups: int, block_size: int, vocab: int) -> IntArray:
    """Return a "score" program's message: frame, :func:`next_tokens`, 0 .. T - 1."""
    import numpy as np

    tokens = next_tokens(frame, groups=groups, block_size=block_size, vocab=vocab)
    return np.concatenate([frame, tokens, np.arange(len(tokens), dtype=np.int32)])


def split_next(message: Array, bucket: Bucket) -> tuple[Any, Any, Any]:
    """Return the frame, the tokens to score and the indices of such a message."""
    size = message.shape[0] - 2 * bucket.tokens
    middle = size + bucket.tokens
    return message[:size], message[size:middle], message[middle:]
