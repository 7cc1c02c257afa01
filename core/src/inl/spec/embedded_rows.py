"""Embeddings in step frames: rows that take the place of looked-up tokens.

A step with the flag EMBEDDED has, after its tokens, the indices [E] of tokens in
ascending order, and float32 bits of their embeddings [E, H]; with the flag HALVED those
of bfloat16, two to a word and the first in its lower half, [E, ceil(H / 2)]. E follows
from the size of the frame and ``Limits.embedding``, H.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import ProtocolError
from inl.spec.message_header import EMBEDDED, HALVED, HEADER_WORD
from inl.spec.step import Array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.spec.message_layout import IntArray


class EmbeddedRows(NamedTuple):
    """Embeddings of a step on the device, in the compute dtype."""

    kept: Array
    """[T, 1]: 1 for a token that is looked up, 0 for one with an embedding."""
    rows: Array
    """[T, H] embeddings; zeros for tokens that are looked up."""


def with_rows(frame: IntArray, rows: Mapping[int, NDArray[np.float32]]) -> IntArray:
    """Return a step frame with the embeddings of tokens, by index.

    They are sent in bfloat16 if all of them are numbers of it.
    """
    import numpy as np

    indices = sorted(rows)
    bits = np.stack([rows[at] for at in indices]).astype(np.float32).view(np.uint32)
    flags = EMBEDDED
    if not (bits & 0xFFFF).any():
        bits, flags = _halved(bits), EMBEDDED | HALVED
    parts = frame, np.array(indices, np.int32), bits.view(np.int32).ravel()
    joined: IntArray = np.concatenate(parts)
    joined[HEADER_WORD.flags] |= flags
    return joined


def _halved(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the upper halves of words [E, H], two to a word."""
    import numpy as np

    upper = np.pad(bits >> 16, ((0, 0), (0, bits.shape[1] % 2)))
    packed: NDArray[np.uint32] = upper[:, ::2] | upper[:, 1::2] << np.uint32(16)
    return packed


def _floats(words: IntArray, width: int, *, halved: bool) -> NDArray[np.float32]:
    """Return embeddings [E, H] of words."""
    import numpy as np

    if not halved:
        return words.view(np.float32)
    bits = words.view(np.uint32)
    pairs = np.stack([bits << np.uint32(16), bits & np.uint32(0xFFFF0000)], axis=-1)
    whole: NDArray[np.float32] = pairs.reshape(len(bits), -1).view(np.float32)
    return np.ascontiguousarray(whole[:, :width])


def read_rows(
    frame: IntArray, size: int, used_tokens: int, width: int
) -> tuple[IntArray, NDArray[np.float32]]:
    """Return the indices [E] and rows [E, H] of a frame whose other words are ``size``.

    width: H, ``Limits.embedding``. Raises :class:`~inl.errors.ProtocolError`.
    """
    import numpy as np

    words, halved = frame[size:], bool(frame[HEADER_WORD.flags] & HALVED)
    row_words = (width + 1) // 2 if halved else width
    count, rest = divmod(len(words), 1 + row_words)
    if not width or rest or not count:
        raise ProtocolError(
            f"embeddings of a step: found {len(words)} words, accepts a multiple of "
            f"{1 + row_words}" + ("" if width else ", and this runner takes none")
        )
    indices = words[:count]
    rows = _floats(words[count:].reshape(count, row_words), width, halved=halved)
    ends = np.concatenate([[-1], indices, [used_tokens]])
    if (np.diff(ends) < 1).any():
        raise ProtocolError(
            f"embeddings of a step: found indices {indices.tolist()!s:.80}, accepts "
            f"ascending ones below {used_tokens}"
        )
    if not np.isfinite(rows).all():
        raise ProtocolError("embeddings of a step: found inf or nan, accepts numbers")
    return indices, rows


def dense_rows(
    indices: IntArray, rows: NDArray[np.float32], tokens: int
) -> tuple[Any, Any]:
    """Return ``kept`` and ``rows`` of :class:`EmbeddedRows`, float32 on the host."""
    import numpy as np

    kept, dense = (
        np.ones((tokens, 1), np.float32),
        np.zeros((tokens, rows.shape[1]), np.float32),
    )
    kept[indices], dense[indices] = 0, rows
    return kept, dense
