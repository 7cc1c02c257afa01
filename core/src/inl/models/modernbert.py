"""ModernBERT (Warner et al., 2024): rotary positions, windows and gated layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.sentence_transformers import read_pooling
from inl.errors import CheckpointError
from inl.models import bert, groups, layer_norm, mlp
from inl.models.config import (
    MAX_EPS,
    context_length,
    fields_of,
    flag,
    number,
    one_of,
    refuse_unless,
    whole,
)
from inl.models.fields import with_defaults
from inl.models.rope import FULL, LOCAL
from inl.models.views import LAYER_KINDS
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import LayerNorm
from inl.ops.rope import RopeScaling
from inl.spec.encoder import Encoder, Labels, Pooling, SequenceBatch
from inl.spec.step import Array
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
    "num_hidden_layers": 22, "num_attention_heads": 12, "hidden_activation": "gelu",
    "max_position_embeddings": 8192, "norm_eps": 1e-5, "local_attention": 128,
    "classifier_activation": "gelu", "global_attn_every_n_layers": 3,
}  # fmt: skip
"""Defaults of config fields."""
THETAS: Final = {FULL: 160000.0, LOCAL: 10000.0}
"""Default base frequency of each kind of layer."""
OLD_THETAS: Final = {FULL: "global_rope_theta", LOCAL: "local_rope_theta"}
"""Top-level fields with them in older configs."""


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """Sizes and constants of one checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    max_tokens: int
    windows: tuple[int | None, ...]
    """Tokens on each side that the queries of each layer see; ``None`` is all."""
    thetas: tuple[float, float]
    """Base frequency of layers without and with a window."""
    norm_eps: float
    activation: str
    head_activation: str
    biases: tuple[bool, bool, bool, bool]
    """Whether attention, feed-forward layers, norms and the head have biases."""
    labels: Labels
    """Results of the head that classifies."""
    pooling: Pooling
    kinds: int = 0
    """Kinds of segments: none."""
    dtype: str = "float32"
    """Compute dtype; the loader sets it."""


class Layer(NamedTuple):
    """Parameters of one layer; the first has no norm before attention."""

    norm: LayerNorm | Group | None
    qkv: QkvLinear | Group
    out: Linear | Group
    mlp_norm: LayerNorm | Group
    mlp: mlp.OpenMlp


class Head(NamedTuple):
    """Parameters of the head that classifies."""

    dense: Linear | Group
    norm: LayerNorm | Group
    out: Linear | Group


class Weights(NamedTuple):
    """Parameters of the whole model."""

    words: Embedding | Group
    norm: LayerNorm | Group
    layers: tuple[Layer, ...]
    last_norm: LayerNorm | Group
    head: Head | None


def config(hf: Mapping[str, Any]) -> ModernBertConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    hidden, heads = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    if hidden % (2 * heads):
        raise CheckpointError(
            f"config field 'num_attention_heads': found {heads}, expected heads of an "
            f"even number of the {hidden} lanes of hidden_size"
        )
    layers, period = whole(hf, "num_hidden_layers"), "global_attn_every_n_layers"
    kinds = hf.get("layer_types") or [
        LOCAL if index % whole(hf, period) else FULL for index in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= set(LAYER_KINDS):
        raise CheckpointError(
            f"config field 'layer_types': found {kinds!r:.80}, expected {layers} of "
            f"{', '.join(LAYER_KINDS)}"
        )
    window = whole(hf, "local_attention") // 2
    refuse_unless(hf, "rope_scaling", None)
    hf.get("tie_word_embeddings")  # of a head of words, which an encoder leaves out
    listed = hf.get("architectures") or ()
    classifies = any(str(name).endswith(bert.CLASSIFIES) for name in listed)
    pooled = one_of(hf, "classifier_pooling", {"cls": "first", "mean": "mean"})
    names = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
    attention, inner, norms, head = (flag(hf, name, False) for name in names)
    return ModernBertConfig(
        vocab_size=whole(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        heads=heads,
        max_tokens=context_length(hf),
        windows=tuple(window if LAYER_KINDS[kind] else None for kind in kinds),
        thetas=(_theta(hf, FULL), _theta(hf, LOCAL)),
        norm_eps=number(hf, "norm_eps", 1e-5, most=MAX_EPS),
        activation=one_of(hf, "hidden_activation", mlp.ACTIVATIONS),
        head_activation=one_of(hf, "classifier_activation", mlp.ACTIVATIONS),
        biases=(attention, inner, norms, head),
        labels=bert.labels_of(hf) if classifies else Labels(),
        pooling=Pooling(pooled, unit=False) if classifies else bert.DEFAULT,
    )


def _theta(hf: Mapping[str, Any], kind: str) -> float:
    """Return the base frequency of a kind of layer."""
    rope = fields_of(fields_of(hf, "rope_parameters"), kind)
    refuse_unless(rope, "rope_type", "default")
    return number(rope, "rope_theta", number(hf, OLD_THETAS[kind], THETAS[kind]))


def weights(c: ModernBertConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    h = c.hidden_size
    *_, norms, head_bias = c.biases
    norm = partial(layer_norm.norm, size=h, bias=norms)
    head = None
    if c.labels.names:
        head = Head(
            groups.linear("head.dense", h, h, bias=head_bias),
            norm("head.norm"),
            groups.linear("classifier", len(c.labels.names), h, bias=True),
        )
    table = groups.linear("embeddings.tok_embeddings", c.vocab_size, h)
    return Weights(
        words=Group("embedding", **table.params),
        norm=norm("embeddings.norm"),
        layers=tuple(_layer(c, index) for index in range(len(c.windows))),
        last_norm=norm("final_norm"),
        head=head,
    )


def _layer(c: ModernBertConfig, index: int) -> Layer:
    h, inner, at = c.hidden_size, c.intermediate_size, f"layers.{index}."
    attention, feed_forward, norms, _ = c.biases
    norm = partial(layer_norm.norm, size=h, bias=norms)

    def part(stem: str, number: int, size: int, parts: int, bias: bool) -> Any:
        """Return weight and bias of one of the layers that are stored as one."""
        span = ((number * size, (number + 1) * size),)
        weight = groups.rows(f"{stem}.weight", span, parts * size, h)
        return weight, groups.rows(f"{stem}.bias", span, parts * size) if bias else None

    qkv: dict[str, Any] = {}
    for number_, name in enumerate("qkv"):
        weight, bias = part(f"{at}attn.Wqkv", number_, h, 3, attention)
        qkv |= {name: weight} | ({f"{name}_bias": bias} if bias else {})
    gate, up = (
        Group("linear", weight=weight, **({"bias": bias} if bias else {}))
        for weight, bias in (
            part(f"{at}mlp.Wi", number_, inner, 2, feed_forward) for number_ in range(2)
        )
    )
    down = groups.linear(f"{at}mlp.Wo", h, inner, bias=feed_forward)
    return Layer(
        norm(f"{at}attn_norm") if index else None,
        Group("qkv_linear", **qkv),
        groups.linear(f"{at}attn.Wo", h, h, bias=attention),
        norm(f"{at}mlp_norm"),
        mlp.OpenMlp(up, down, gate),
    )


def encode(ops: Ops, c: ModernBertConfig, w: Weights, batch: SequenceBatch) -> Array:
    """Return the hidden states [T, H] after the last norm."""
    x = ops.layer_norm(ops.embedding(batch.tokens, w.words), w.norm, eps=c.norm_eps)
    tokens, hidden = x.shape
    dim = hidden // c.heads
    full, local = (
        ops.rope_table(batch.positions, dim=dim, theta=theta, scaling=RopeScaling())
        for theta in c.thetas
    )
    for layer, window in zip(w.layers, c.windows, strict=True):
        y = x
        if layer.norm is not None:
            y = ops.layer_norm(x, layer.norm, eps=c.norm_eps)
        parts = ops.qkv_linear(y, layer.qkv)
        q, k, v = (part.reshape(tokens, c.heads, dim) for part in parts)
        q, k = ops.rope(q, k, *(full if window is None else local))
        mixed = ops.full_attention(
            q, k, v, batch.starts, scale=dim**-0.5, window=window
        )
        x = x + ops.linear(mixed.reshape(tokens, hidden), layer.out)
        y = ops.layer_norm(x, layer.mlp_norm, eps=c.norm_eps)
        x = x + mlp.feed_forward(ops, y, layer.mlp, c.activation)
    return ops.layer_norm(x, w.last_norm, eps=c.norm_eps)


def pool(
    ops: Ops, c: ModernBertConfig, w: Weights, hidden: Array, batch: SequenceBatch
) -> Array:
    """Return the logits of the labels [N, labels], or the pooled states [N, H]."""
    pooled = ops.pool(hidden, batch.starts, kind=c.pooling.kind)
    if w.head is not None:
        dense = ops.activate(ops.linear(pooled, w.head.dense), kind=c.head_activation)
        return ops.linear(
            ops.layer_norm(dense, w.head.norm, eps=c.norm_eps), w.head.out
        )
    return ops.unit_rows(pooled) if c.pooling.unit else pooled


UNUSED: Final = re.compile(r"^(head|classifier|decoder)\.")
"""Tensors of heads, which only some models use."""


def adapt(
    c: ModernBertConfig, checkpoint: Checkpoint
) -> tuple[ModernBertConfig, AdaptedCheckpoint]:
    """Remove the prefix of tensors, and read how the files pool."""
    pieces = {
        name.removeprefix("model."): Piece((name,), checkpoint.spec(name)[1])
        for name in checkpoint.names()
        if c.labels.names or not UNUSED.search(name)
    }
    pooling = c.pooling
    if not c.labels.names:
        pooling = read_pooling(checkpoint.path, pooling)
    return replace(c, pooling=pooling), AdaptedCheckpoint(checkpoint, pieces)


MODEL = Encoder(config, weights, encode, pool, adapt)
