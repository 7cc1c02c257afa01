"""Encoders: models that compute whole sequences at once, without a cache or steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from inl.spec.model import unchanged
from inl.spec.step import Array, Bucket
from inl.spec.strict_array import StrictArray


class SequenceBatch(NamedTuple):
    """Sequences of an encoder program, one after the other, on the device.

    T tokens and N sequences, with padding: the last sequences may have no tokens, and
    the last tokens may belong to none.
    """

    tokens: Array
    """[T] int32 token ids, or [T, P] inputs of another kind."""
    positions: Array
    """[T] int32 place of the token in its sequence, or [axes, T] along each axis."""
    kinds: Array
    """[T] int32 kind of the token's segment: 1 in the second text of a pair, else 0."""
    starts: Array
    """[N + 1] int32: sequence n has the tokens starts[n] .. starts[n + 1] - 1."""
    windows: Array | None = None
    """[M + 1] int32: bounds of parts of sequences, for the layers of a vision encoder
    whose tokens see their part only; ``None`` for other models."""
    weights: Array | None = None
    """[K, T, 1] weights of the K rows of a table of places that a patch interpolates,
    whose indices are ``kinds`` [K, T]; ``None`` for other models."""


class TokenSequence(NamedTuple):
    """A sequence to encode."""

    tokens: Sequence[int]
    kinds: Sequence[int] = ()
    """Kind of each token's segment; empty: all 0."""


def text_specs(_config: Any, bucket: Bucket) -> SequenceBatch:
    """Return the specs of a batch of token ids."""
    ids = StrictArray((bucket.tokens,), "int32")
    starts = StrictArray((bucket.rows + 1,), "int32")
    return SequenceBatch(tokens=ids, positions=ids, kinds=ids, starts=starts)


def no_state(_config: Any) -> tuple[()]:
    """Return that nothing is stored between programs."""
    return ()


class EncoderLayers(NamedTuple):
    """An encoder layer by layer, so that steps are computed between its layers.

    A config has ``layers``, their number.
    """

    begin: Callable[..., tuple[Array, ...]]
    """(ops, config, w, batch) -> arrays, the first of which is [T, H] hidden states."""
    layer: Callable[..., tuple[Array, ...]]
    """(ops, config, w, batch, arrays, index) -> the arrays after a layer."""

    def encode(
        self, ops: Any, config: Any, w: Any, batch: SequenceBatch
    ) -> tuple[Array, ...]:
        """Return the arrays after all layers: ``encode`` of the :class:`Encoder`."""
        arrays = self.begin(ops, config, w, batch)
        for index in range(config.layers):
            arrays = self.layer(ops, config, w, batch, arrays, index)
        return arrays


@dataclass(frozen=True, slots=True)
class Encoder:
    """An architecture whose programs encode sequences, beside :class:`Model`.

    ``ops`` is an :class:`inl.ops.protocol.Ops`. A config has ``vocab_size``,
    ``hidden_size``, ``max_tokens``, ``dtype``, ``pooling`` and ``labels``.
    """

    config: Callable[..., Any]
    """(Hugging Face config dict) -> frozen, hashable config."""
    weights: Callable[[Any], Any]
    """(config) -> NamedTuple whose leaves are groups."""
    encode: Callable[..., Any]
    """(ops, config, w, batch) -> hidden states [T, H] of a :class:`SequenceBatch`, or
    the arrays of ``layers``."""
    pool: Callable[..., Any]
    """(ops, config, w, hidden, batch) -> a result [N, K] of each sequence, or of each
    group of patches; or a tuple of them."""
    adapt: Callable[[Any, Any], tuple[Any, Any]] = unchanged
    """(config, checkpoint) -> both in the layout that ``weights`` declares."""
    state: Callable[[Any], tuple[()]] = no_state
    specs: Callable[[Any, Bucket], SequenceBatch] = text_specs
    """(config, bucket) -> specs of a batch."""
    layers: EncoderLayers | None = None
    """What ``encode`` computes, layer by layer; ``None``: at once only."""


class Pooling(NamedTuple):
    """How the hidden states of a sequence become its result."""

    kind: str = "mean"
    """One of :data:`inl.ops.pool.POOLINGS`."""
    unit: bool = True
    """Whether the result is scaled to length 1."""


class Labels(NamedTuple):
    """Results of a head that classifies."""

    names: tuple[str, ...] = ()
    """Name of each; none if a model has no such head."""
    activation: str = "softmax"
    """What turns logits into scores: "softmax", "sigmoid" or "identity"."""


def encode(
    ops: Any, model: Encoder, config: Any, weights: Any, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Encode sequences: the function of the program "encode"."""
    hidden = model.encode(ops, config, weights, batch)
    return _pooled(ops, model, config, weights, hidden, batch)


def encode_part(
    ops: Any, model: Encoder, config: Any, part: int, weights: Any,
    batch: SequenceBatch, arrays: tuple[Array, ...],
) -> tuple[Array, tuple[Array, ...]]:  # fmt: skip
    """Compute a part of an encoder: the function of the program "encode_part".

    part: 0 is what is before the layers, ``n`` the ``n``-th layer, and that after the
    last layer the results. arrays: of the part before, ``()`` for part 0. Returns one
    row of the first array, which the host reads to wait for the part, and the arrays
    or results.
    """
    layers = model.layers
    assert layers is not None, "others are computed at once"
    if part == 0:
        arrays = layers.begin(ops, config, weights, batch)
    elif part <= config.layers:
        arrays = layers.layer(ops, config, weights, batch, arrays, part - 1)
    else:
        arrays = _pooled(ops, model, config, weights, arrays, batch)
    return arrays[0][:1], arrays


def _pooled(
    ops: Any, model: Encoder, config: Any, weights: Any, hidden: Any,
    batch: SequenceBatch,
) -> tuple[Array, ...]:  # fmt: skip
    results = model.pool(ops, config, weights, hidden, batch)
    return results if isinstance(results, tuple) else (results,)
