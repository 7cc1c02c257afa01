"""Embeddings in step frames: rows that take the place of looked-up tokens.

A step with the flag EMBEDDED has, after its tokens, the indices [E] of tokens in
ascending order, and float32 bits of their embeddings [E, H]. E follows from the size of
the frame and ``Limits.embedding``, H.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import ProtocolError
from inl.spec.message_header import EMBEDDED, HEADER_WORD
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
    """Return a step frame with the embeddings of tokens, by index."""
    import numpy as np

    indices = sorted(rows)
    bits = np.stack([rows[at] for at in indices]).astype(np.float32).view(np.int32)
    parts = frame, np.array(indices, np.int32), bits.ravel()
    joined: IntArray = np.concatenate(parts)
    joined[HEADER_WORD.flags] |= EMBEDDED
    return joined


def read_rows(
    frame: IntArray, size: int, used_tokens: int, width: int
) -> tuple[IntArray, NDArray[np.float32]]:
    """Return the indices [E] and rows [E, H] of a frame whose other words are ``size``.

    width: H, ``Limits.embedding``. Raises :class:`~inl.errors.ProtocolError`.
    """
    import numpy as np

    words = frame[size:]
    count, rest = divmod(len(words), 1 + width)
    if not width or rest or not count:
        raise ProtocolError(
            f"embeddings of a step: found {len(words)} words, accepts a multiple of "
            f"{1 + width}" + ("" if width else ", and this runner takes none")
        )
    indices, rows = words[:count], words[count:].view(np.float32).reshape(count, width)
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
