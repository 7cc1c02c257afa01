"""Inputs of tokens in step frames: embeddings, positions along axes, spans, features.

A step with the flag EMBEDDED has, after its tokens, the indices [E] of tokens in
ascending order, and float32 bits of their embeddings [E, H]; with the flag HALVED those
of bfloat16, two to a word and the first in its lower half, [E, ceil(H / 2)]. E follows
from the size of the frame and ``Limits.embedding``, H.

A runner whose model takes more (``Limits.axes``, ``Limits.spans`` and
``Limits.feature_layers``) has in place of it: E and P; indices [E], embeddings [E, H]
and features [E, F, H], halved in the same way; indices [P] and, for each, its offsets
[axes] and its span [2].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import HostArray, widen, wrap
from inl.errors import ProtocolError
from inl.spec.message_header import EMBEDDED, HALVED, HEADER_WORD
from inl.spec.step import Array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.spec.limits import Limits
    from inl.spec.message_layout import IntArray

    Floats = NDArray[Any]
    """Numbers on the host: float32, or uint16, which are the bits of bfloat16."""


def host_floats(array: HostArray) -> Floats:
    """Return an array of bfloat16 as its bits, and others as float32."""
    import numpy as np

    if array.dtype == "bfloat16":
        return array.data.reshape(array.shape)
    return widen(array).astype(np.float32, copy=False)


def as_array(floats: Floats) -> HostArray:
    """Return numbers with their dtype."""
    is_halved = floats.dtype.name == "uint16"
    return HostArray(floats, "bfloat16" if is_halved else "float32", floats.shape)


class EmbeddedRows(NamedTuple):
    """Inputs of the tokens of a step on the device.

    What the model of a runner does not take is ``None``.
    """

    kept: Array
    """[T, 1] compute dtype: 1 for a token that is looked up, 0 for one with an
    embedding."""
    rows: Array
    """[T, H] compute dtype: embeddings; zeros for tokens that are looked up."""
    offsets: Array | None = None
    """[axes, T] int32: position along each axis minus that in the sequence."""
    spans: Array | None = None
    """[T, 2] int32: first position and end of the span of tokens that attend to each
    other in both directions; zeros for a token of none."""
    features: Array | None = None
    """[F, T, H] compute dtype: added to the hidden states after each of
    ``Limits.feature_layers``; zeros for tokens without an embedding."""


class TokenInputs(NamedTuple):
    """Inputs of some tokens of a step on the host."""

    indices: IntArray
    """[E] tokens with an embedding, ascending."""
    rows: HostArray
    """[E, H] embeddings, float32 or bfloat16 as are the features."""
    features: HostArray
    """[E, F, H]."""
    placed: IntArray
    """[P] tokens with an offset or a span, ascending."""
    offsets: IntArray
    """[P, axes]."""
    spans: IntArray
    """[P, 2], or [P, 0] for a model without."""

    def dense(self, tokens: int, limits: Limits) -> EmbeddedRows:
        """Return the fields of :class:`EmbeddedRows` as arrays of the host.

        Floats are float32, or bfloat16 if the inputs are.
        """
        import numpy as np

        width, layers = limits.embedding, len(limits.feature_layers)
        kept = np.ones((tokens, 1), np.float32)
        rows = np.zeros((tokens, width), self.rows.data.dtype)
        kept[self.indices], rows[self.indices] = 0, self.rows.data
        offsets = spans = features = None
        if limits.axes:
            offsets = np.zeros((limits.axes, tokens), np.int32)
            offsets[:, self.placed] = self.offsets.T
        if limits.spans:
            spans = np.zeros((tokens, 2), np.int32)
            spans[self.placed] = self.spans
        if layers:
            features = np.zeros((layers, tokens, width), rows.dtype)
            for layer, added in enumerate(features):
                added[self.indices] = self.features.data[:, layer]
        return EmbeddedRows(
            wrap(kept),
            as_array(rows),
            None if offsets is None else wrap(offsets),
            None if spans is None else wrap(spans),
            None if features is None else as_array(features),
        )


def token_inputs(
    limits: Limits,
    rows: Mapping[int, Floats],
    features: Mapping[int, Floats] | None = None,
    offsets: Mapping[int, Any] | None = None,
    spans: Mapping[int, tuple[int, int]] | None = None,
) -> TokenInputs:
    """Return inputs of tokens by their index in the step.

    rows: [H]. features: [F, H], zeros for a token of ``rows`` that has none. offsets:
    [axes]. spans: first position and end.
    """
    import numpy as np

    width, layers = limits.embedding, len(limits.feature_layers)
    at, placed = sorted(rows), sorted({*(offsets or {}), *(spans or {})})
    given = [*rows.values(), *(features or {}).values()]
    is_halved = bool(at) and all(row.dtype == np.uint16 for row in given)
    dtype = np.uint16 if is_halved else np.float32
    stacked = np.empty((len(at), width), dtype)
    added = np.zeros((len(at), layers, width), dtype)
    turned = np.zeros((len(placed), limits.axes), np.int32)
    seen = np.zeros((len(placed), 2 * limits.spans), np.int32)
    for row, index in enumerate(at):
        stacked[row] = _in_dtype(rows[index], dtype)
        if layers and features and index in features:
            added[row] = _in_dtype(features[index], dtype)
    for row, index in enumerate(placed):
        turned[row] = (offsets or {}).get(index, 0)
        if limits.spans:
            seen[row] = (spans or {}).get(index, (0, 0))
    return TokenInputs(
        np.array(at, np.int32), as_array(stacked), as_array(added),
        np.array(placed, np.int32), turned, seen,
    )  # fmt: skip


def _in_dtype(floats: Floats, dtype: type[Any]) -> Floats:
    is_other = dtype.__name__ == "float32" and floats.dtype.name == "uint16"
    return widen(as_array(floats)) if is_other else floats


def with_inputs(frame: IntArray, inputs: TokenInputs, limits: Limits) -> IntArray:
    """Return a step frame with the inputs of tokens.

    Embeddings and features are sent in bfloat16 if all of them are numbers of it.
    """
    import numpy as np

    rows, features, flags = inputs.rows.data, inputs.features.data, EMBEDDED
    if inputs.rows.dtype == "float32" and not (
        _halves(rows)[..., 0].any() or _halves(features)[..., 0].any()
    ):
        rows, features = _halves(rows)[..., 1], _halves(features)[..., 1]
    if rows.dtype == np.uint16:
        rows, features, flags = _in_words(rows), _in_words(features), EMBEDDED | HALVED
    parts = [frame, inputs.indices, rows.view(np.int32).ravel()]
    if not limits.takes_rows_only:
        counts = np.array([len(inputs.indices), len(inputs.placed)], np.int32)
        placed = np.concatenate([inputs.offsets, inputs.spans], 1).ravel()
        parts.insert(1, counts)
        parts += [features.view(np.int32).ravel(), inputs.placed, placed]
    joined: IntArray = np.concatenate(parts).astype(np.int32, copy=False)
    joined[HEADER_WORD.flags] |= flags
    return joined


def with_rows(frame: IntArray, rows: Mapping[int, Floats], limits: Limits) -> IntArray:
    """Return a step frame with the embeddings of tokens, by index."""
    return with_inputs(frame, token_inputs(limits, rows), limits)


def _halves(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the halves of words [..., H, 2], the lower one first."""
    import numpy as np

    halves = np.ascontiguousarray(floats).view("<u2")
    return halves.reshape(*floats.shape, 2)


def _in_words(bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return bits that fill whole words."""
    import numpy as np

    if not bits.shape[-1] % 2:
        return np.ascontiguousarray(bits)
    axes = ((0, 0),) * (bits.ndim - 1)
    return np.pad(bits, (*axes, (0, 1)))


def _floats(words: IntArray, width: int, *, halved: bool) -> HostArray:
    """Return the floats [..., H] of words."""
    import numpy as np

    if not halved:
        return wrap(words.view(np.float32))
    bits = np.ascontiguousarray(words).view("<u2")[..., :width]
    return as_array(bits)


def is_finite(floats: Floats) -> bool:
    """Whether all are numbers."""
    import numpy as np

    if floats.dtype == np.float32:
        return bool(np.isfinite(floats).all())
    # Infinity is the largest of either sign; maxima need no memory, unlike masks.
    signed = floats.view(np.int16)
    return not floats.size or (signed.max() < 0x7F80 and floats.max() < 0xFF80)


def read_inputs(
    frame: IntArray, size: int, used_tokens: int, limits: Limits
) -> TokenInputs:
    """Return the inputs in a frame whose other words are ``size``.

    Raises :class:`~inl.errors.ProtocolError`.
    """
    import numpy as np

    halved = bool(frame[HEADER_WORD.flags] & HALVED)
    words, width, axes = frame[size:], limits.embedding, limits.axes
    row_words = (width + 1) // 2 if halved else width
    layers, places = len(limits.feature_layers), axes + 2 * limits.spans
    if limits.takes_rows_only:
        count, rest = divmod(len(words), 1 + row_words)
        if not width or rest or not count:
            raise ProtocolError(
                f"embeddings of a step: found {len(words)} words, accepts a multiple "
                f"of {1 + row_words}"
                + ("" if width else ", and this runner takes none")
            )
        placed = 0
    else:
        count, placed = (int(n) for n in words[:2]) if len(words) > 1 else (-1, -1)
        words = words[2:]
        wanted = count * (1 + (1 + layers) * row_words) + placed * (1 + places)
        if min(count, placed) < 0 or not count + placed or len(words) != wanted:
            raise ProtocolError(
                f"inputs of a step: found {len(words)} words for {count} embeddings "
                f"and {placed} positions, accepts {wanted}"
            )
    floats = count * row_words
    sizes = count, floats, floats * layers, placed, placed * places
    indices, rows, features, at, given = np.split(words, np.cumsum(sizes)[:-1])
    table = given.reshape(placed, places)
    inputs = TokenInputs(
        indices=indices,
        rows=_floats(rows.reshape(count, row_words), width, halved=halved),
        features=_floats(
            features.reshape(count, layers, row_words), width, halved=halved
        ),
        placed=at,
        offsets=table[:, :axes],
        spans=table[:, axes:],
    )
    for index in (indices, at):
        ends = np.concatenate([[-1], index, [used_tokens]])
        if (np.diff(ends) < 1).any():
            raise ProtocolError(
                f"embeddings of a step: found indices {index.tolist()!s:.80}, accepts "
                f"ascending ones below {used_tokens}"
            )
    if not (is_finite(inputs.rows.data) and is_finite(inputs.features.data)):
        raise ProtocolError("embeddings of a step: found inf or nan, accepts numbers")
    return inputs
