"""Decoders whose tokens attend in both directions: encoders of whole texts.

As embedding models are trained from a decoder's weights (BehnamGhader et al., 2024;
EmbeddingGemma, 2025). A config says so by ``is_causal: false``, Gemma's by
``use_bidirectional_attention``. The layers are those of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from inl.checkpoints.sentence_transformers import read_pooling
from inl.errors import CheckpointError
from inl.models.config import one_of
from inl.models.fields import changed
from inl.models.hidden_ops import AllHiddenOps, hidden_head
from inl.spec.cache import State
from inl.spec.encoder import Encoder, Labels, Pooling, SequenceBatch
from inl.spec.model import Model
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.ops.protocol import Ops

FAMILIES: Final = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` whose layers have no attention but :meth:`TwoWayOps`'s."""
GEMMA: Final = "use_bidirectional_attention"
"""Field of Gemma's configs, whose windows are half as long then on each side."""


@dataclass(frozen=True, slots=True)
class TwoWayConfig:
    """Sizes and constants of one checkpoint."""

    decoder: Any
    """Config of the decoder."""
    halved: bool
    """Whether a window is divided by two for each side."""
    pooling: Pooling = field(default_factory=Pooling)
    labels: Labels = field(default_factory=Labels)
    kinds: int = 0
    """Kinds of segments."""
    dtype: str = "float32"
    """Compute dtype; the loader sets it."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.decoder.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return int(self.decoder.hidden_size)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.decoder.max_tokens)

    @property
    def typed(self) -> Any:
        """Config of the decoder with the compute dtype."""
        return replace(self.decoder, dtype=self.dtype)


def attends_both_ways(hf: Mapping[str, Any]) -> bool:
    """Whether a decoder's config says that its attention is not causal."""
    return hf.get("is_causal") is False or hf.get(GEMMA) is True


def both_ways(model: Model) -> Encoder:
    """Return a decoder's layers as an encoder."""
    return Encoder(
        partial(config, model), partial(weights, model), partial(encode, model), pool,
        partial(adapt, model),
    )  # fmt: skip


def config(model: Model, hf: Mapping[str, Any]) -> TwoWayConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    one_of(hf, "model_type", {name: name for name in FAMILIES})
    given = changed(hf, **{GEMMA: False})
    return TwoWayConfig(model.config(given), halved=hf.get(GEMMA) is True)


def weights(model: Model, c: TwoWayConfig) -> Any:
    """Return the decoder's weight tree without its projection to logits."""
    return model.weights(c.typed)._replace(head=None)


class TwoWayOps:
    """Attention to all tokens of a sequence, in place of that over a cache."""

    def __init__(self, ops: Ops, batch: SequenceBatch, *, halved: bool) -> None:
        self._ops, self._starts, self._halved = ops, batch.starts, halved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(
        self, q: Array, k: Array, v: Array, cache: Any, _step: Step, *, scale: float,
        window: int | None = None, cap: float | None = None, group: int = 0,  # noqa: ARG002
    ) -> tuple[Array, Any]:  # fmt: skip
        """Compute :data:`inl.ops.full_attention.full_attention`."""
        if cap is not None:
            raise CheckpointError(
                f"config field 'attn_logit_softcapping': found {cap}, accepted with "
                "attention in both directions: null"
            )
        if window is not None and self._halved:
            window //= 2
        out = self._ops.full_attention(
            q, k, v, self._starts, scale=scale, window=window
        )
        return out, cache

    def attend_project(
        self, q: Array, k: Array, v: Array, cos: Array, sin: Array, cache: Any,
        step: Step, w: Any, **attributes: Any,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Rotate, compute attention and project the result."""
        q, k = self._ops.rope(q, k, cos, sin)
        out, cache = self.attend(q, k, v, cache, step, **attributes)
        return self._ops.linear(out.reshape(out.shape[0], -1), w), cache


def encode(
    model: Model, ops: Ops, c: TwoWayConfig, w: Any, batch: SequenceBatch
) -> Array:
    """Return the hidden states [T, H] after the last norm."""
    decoder, unused = c.typed, batch.tokens
    step = Step(
        tokens=batch.tokens, positions=batch.positions, rows=unused,
        starts=batch.starts, lengths=unused, slots=unused, blocks=unused,
        writes=unused, samples=unused, adapters=unused, used_counts=unused,
        uniforms=unused,
    )  # fmt: skip
    count = len(w.layers)
    state = State(caches=(None,) * count, slotted={}, tables=cast("Any", None))
    two_way = cast("Ops", TwoWayOps(ops, batch, halved=c.halved))
    carry = model.embed(two_way, decoder, w, step)
    for index, own in enumerate(w.layers):
        carry, state = model.layer(
            two_way, decoder, own, carry, step, state, index=index
        )
    hidden: Array = hidden_head(
        model.head, ops, decoder, w, carry, step, kind=AllHiddenOps
    )
    return hidden


def pool(
    ops: Ops, c: TwoWayConfig, _w: Any, hidden: Array, batch: SequenceBatch
) -> Array:
    """Return the pooled states [N, H]."""
    pooled = ops.pool(hidden, batch.starts, kind=c.pooling.kind)
    return ops.unit_rows(pooled) if c.pooling.unit else pooled


def adapt(
    model: Model, c: TwoWayConfig, checkpoint: Checkpoint
) -> tuple[TwoWayConfig, Checkpoint]:
    """Adapt the decoder's layout, and read how the files pool."""
    decoder, adapted = model.adapt(c.decoder, checkpoint)
    pooling = read_pooling(checkpoint.path, c.pooling)
    return replace(c, decoder=decoder, pooling=pooling), adapted
