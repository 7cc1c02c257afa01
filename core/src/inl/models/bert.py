"""BERT (Devlin et al., 2019), and encoders with its layers under other names.

RoBERTa and XLM-R (Liu et al., 2019; Conneau et al., 2020) count positions from the
padding id; MPNet (Song et al., 2020) adds a bias by distance to attention scores. Each
is pooled as sentence-transformers does, or has a head that classifies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.sentence_transformers import read_pooling
from inl.errors import CheckpointError
from inl.models import groups, layer_norm, mlp
from inl.models.config import MAX_EPS, flag, number, one_of, refuse_unless, whole
from inl.models.fields import with_defaults
from inl.ops.embedding import Embedding
from inl.ops.full_attention import DistanceBias
from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import LayerNorm
from inl.spec.encoder import Encoder, Labels, Pooling, SequenceBatch
from inl.spec.step import Array
from inl.spec.weights import Group, Param, RowSlices

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.ops.protocol import Ops

FAR: Final = 128
"""Distance from which on MPNet's bias is the same."""

DEFAULT: Final = Pooling()
"""Pooling of files that name none, as of sentence-transformers."""

CLASSIFIES: Final = "ForSequenceClassification"
"""Suffix of the names of models with a head."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes and constants of one checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    positions: int
    """Rows of the position embedding."""
    first_position: int
    """Row of the first token of a sequence."""
    kinds: int
    """Kinds of segments; 0 without an embedding of them."""
    buckets: int
    """Distances of MPNet's bias; 0 without."""
    norm_eps: float
    activation: str
    labels: Labels
    """Results of the head that classifies."""
    head_names: tuple[str, str]
    """Modules of that head."""
    pooling: Pooling = DEFAULT
    dtype: str = "float32"
    """Compute dtype; the loader sets it."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.positions - self.first_position


class Layer(NamedTuple):
    """Parameters of one layer."""

    qkv: QkvLinear | Group
    out: Linear | Group
    norm: LayerNorm | Group
    up: Linear | Group
    down: Linear | Group
    last_norm: LayerNorm | Group


class Weights(NamedTuple):
    """Parameters of the whole model."""

    words: Embedding | Group
    positions: Embedding | Group
    kinds: Embedding | Group | None
    norm: LayerNorm | Group
    bias: DistanceBias | Group | None
    layers: tuple[Layer, ...]
    head: tuple[Linear | Group, ...]


def config(
    hf: Mapping[str, Any], *, offset: bool = False, kinds: bool = True,
    buckets: bool = False, head: tuple[str, str] = ("pooler.dense", "classifier"),
    defaults: Mapping[str, Any] | None = None,
) -> BertConfig:  # fmt: skip
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field.

    offset: whether positions begin after the padding id. kinds: whether segments have
    embeddings. buckets: whether attention has a bias by distance. head: modules of the
    head that classifies.
    """
    hf = with_defaults(hf, SIZES | dict(defaults or {}))
    refuse_unless(hf, "position_embedding_type", "absolute")
    hf.get("tie_word_embeddings")  # of a head of words, which an encoder leaves out
    if flag(hf, "is_decoder", False):
        raise CheckpointError("config field 'is_decoder': found true, accepted: false")
    hidden, heads = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(
            f"config field 'num_attention_heads': found {heads}, "
            f"expected a divisor of hidden_size, {hidden}"
        )
    listed = hf.get("architectures") or ()
    classifies = any(str(name).endswith(CLASSIFIES) for name in listed)
    return BertConfig(
        vocab_size=whole(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        layers=whole(hf, "num_hidden_layers"),
        heads=heads,
        positions=whole(hf, "max_position_embeddings"),
        first_position=whole(hf, "pad_token_id", 1, least=0) + 1 if offset else 0,
        kinds=whole(hf, "type_vocab_size") if kinds else 0,
        buckets=whole(hf, "relative_attention_num_buckets") if buckets else 0,
        norm_eps=number(hf, "layer_norm_eps", 1e-12, most=MAX_EPS),
        activation=one_of(hf, "hidden_act", mlp.ACTIVATIONS),
        labels=labels_of(hf) if classifies else Labels(),
        head_names=head,
    )


ACTIVATIONS: Final = {"Identity": "identity", "Sigmoid": "sigmoid"}
"""Classes of torch that configs of cross-encoders name."""


def labels_of(hf: Mapping[str, Any]) -> Labels:
    """Return the labels of a config, and how their scores are computed.

    One label is a score by the sigmoid, of problems of one label softmax is the usual.
    A cross-encoder's config may name the activation. Raises :class:`CheckpointError`.
    """
    named = hf.get("id2label")
    if isinstance(named, Mapping):
        names = tuple(str(named[key]) for key in sorted(named, key=int))
    else:
        names = tuple(f"LABEL_{n}" for n in range(whole(hf, "num_labels", 2)))
    kind = hf.get("problem_type")
    usual = "sigmoid" if len(names) == 1 else "softmax"
    if kind == "multi_label_classification":
        usual = "sigmoid"
    elif kind == "regression":
        usual = "identity"
    nested = hf.get("sentence_transformers")
    given = hf.get("sbert_ce_default_activation_function")
    if isinstance(nested, Mapping):
        given = nested.get("activation_fn", given)
    if given is None:
        return Labels(names, usual)
    activation = ACTIVATIONS.get(str(given).rpartition(".")[2])
    if activation is None:
        raise CheckpointError(
            f"config field 'activation_fn': found {given!r:.80}, accepted: "
            f"{', '.join(ACTIVATIONS)} of torch"
        )
    return Labels(names, activation)


SIZES: Final = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
    "type_vocab_size": 2, "vocab_size": 30522, "layer_norm_eps": 1e-12,
}  # fmt: skip
"""Defaults of config fields."""


def weights(c: BertConfig) -> Weights:
    """Return the weight tree, by the names of BERT without a prefix."""
    h, stem = c.hidden_size, "embeddings."
    norm = partial(layer_norm.norm, size=h, bias=True)
    rows = RowSlices(((c.first_position, c.positions),), c.positions)
    places = Param(f"{stem}position_embeddings.weight", (c.max_tokens, h))
    places = places._replace(row_slices=rows if c.first_position else None)
    kinds = Param(f"{stem}token_type_embeddings.weight", (c.kinds, h))
    head: tuple[Group, ...] = ()
    if c.labels.names:
        dense, out = c.head_names
        head = (
            groups.linear(dense, h, h, bias=True),
            groups.linear(out, len(c.labels.names), h, bias=True),
        )
    return Weights(
        words=Group("embedding", weight=Param(
            f"{stem}word_embeddings.weight", (c.vocab_size, h)
        )),
        positions=Group("embedding", weight=places),
        kinds=Group("embedding", weight=kinds) if c.kinds else None,
        norm=norm(f"{stem}LayerNorm"),
        bias=_distance_bias(c) if c.buckets else None,
        layers=tuple(_layer(c, f"encoder.layer.{i}.") for i in range(c.layers)),
        head=head,
    )  # fmt: skip


def _layer(c: BertConfig, at: str) -> Layer:
    h = c.hidden_size
    params: dict[str, Param] = {}
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        source = f"{at}attention.self.{name}"
        params[short] = Param(f"{source}.weight", (h, h))
        params[f"{short}_bias"] = Param(f"{source}.bias", (h,))
    norm = partial(layer_norm.norm, size=h, bias=True)
    return Layer(
        Group("qkv_linear", **params),
        groups.linear(f"{at}attention.output.dense", h, h, bias=True),
        norm(f"{at}attention.output.LayerNorm"),
        groups.linear(f"{at}intermediate.dense", c.intermediate_size, h, bias=True),
        groups.linear(f"{at}output.dense", h, c.intermediate_size, bias=True),
        norm(f"{at}output.LayerNorm"),
    )


def _distance_bias(c: BertConfig) -> Group:
    """Return the bias of each distance, from the row of its bucket."""
    rows = [_bucket(distance, c.buckets) for distance in range(-FAR, FAR + 1)]
    slices = RowSlices(tuple((row, row + 1) for row in rows), c.buckets)
    source = "encoder.relative_attention_bias.weight"
    weight = Param(source, (len(rows), c.heads), row_slices=slices)
    return Group("biased_attention", weight=weight)


def _bucket(distance: int, buckets: int) -> int:
    """Return the bucket of a key ``distance`` tokens after its query.

    Half of the buckets are for keys after the query. Half of those are single
    distances, the others grow up to :data:`FAR` (Raffel et al., 2020).
    """
    half, far = buckets // 2, abs(distance)
    first = half if distance > 0 else 0
    exact = half // 2
    if far < exact:
        return first + far
    share = np.log(np.float32(far) / exact) / np.log(FAR / exact)
    return first + min(half - 1, exact + int(share * (half - exact)))


def encode(ops: Ops, c: BertConfig, w: Weights, batch: SequenceBatch) -> Array:
    """Return the hidden states [T, H] after the last layer."""
    x = embed(ops, c, w, batch)
    for index in range(c.layers):
        x = layer(ops, c, w, batch, x, index)
    return x


def embed(ops: Ops, c: BertConfig, w: Weights, batch: SequenceBatch) -> Array:
    """Return the hidden states [T, H] before the first layer."""
    x = ops.embedding(batch.tokens, w.words)
    x = x + ops.embedding(batch.positions, w.positions)
    if w.kinds is not None:
        x = x + ops.embedding(batch.kinds, w.kinds)
    return ops.layer_norm(x, w.norm, eps=c.norm_eps)


def layer(
    ops: Ops, c: BertConfig, w: Weights, batch: SequenceBatch, x: Array, index: int
) -> Array:
    """Return the hidden states [T, H] after a layer."""
    tokens, hidden = x.shape
    shape, own = (tokens, c.heads, hidden // c.heads), w.layers[index]
    scale = shape[-1] ** -0.5
    q, k, v = (part.reshape(*shape) for part in ops.qkv_linear(x, own.qkv))
    if w.bias is not None:
        mixed = ops.biased_attention(q, k, v, batch.starts, w.bias, scale=scale)
    else:
        mixed = ops.full_attention(q, k, v, batch.starts, scale=scale, window=None)
    x = x + ops.linear(mixed.reshape(tokens, hidden), own.out)
    x = ops.layer_norm(x, own.norm, eps=c.norm_eps)
    inner = ops.activate(ops.linear(x, own.up), kind=c.activation)
    x = x + ops.linear(inner, own.down)
    return ops.layer_norm(x, own.last_norm, eps=c.norm_eps)


def pool(
    ops: Ops, c: BertConfig, w: Weights, hidden: Array, batch: SequenceBatch
) -> Array:
    """Return the logits of the labels [N, labels], or the pooled states [N, H]."""
    if c.labels.names:
        dense, out = w.head
        first = ops.pool(hidden, batch.starts, kind="first")
        return ops.linear(ops.activate(ops.linear(first, dense), kind="tanh"), out)
    pooled = ops.pool(hidden, batch.starts, kind=c.pooling.kind)
    return ops.unit_rows(pooled) if c.pooling.unit else pooled


OTHERS: Final = {
    r"^(bert|roberta|mpnet)\.": "",
    r"\.gamma$": ".weight",
    r"\.beta$": ".bias",
    r"\.attention\.attn\.q\.": ".attention.self.query.",
    r"\.attention\.attn\.k\.": ".attention.self.key.",
    r"\.attention\.attn\.v\.": ".attention.self.value.",
    r"\.attention\.attn\.o\.": ".attention.output.dense.",
    r"\.attention\.LayerNorm\.": ".attention.output.LayerNorm.",
}
"""Parts of names of other checkpoints, as patterns, and what they are in BERT's."""
UNUSED: Final = re.compile(r"^(cls|lm_head|pooler|classifier)\.|position_ids$")
"""Tensors of heads, which only some models use."""


def adapt(
    c: BertConfig, checkpoint: Checkpoint
) -> tuple[BertConfig, AdaptedCheckpoint]:
    """Rename tensors, and read how the files pool.

    Raises :class:`CheckpointError` for modules that are not known.
    """
    pieces: dict[str, Piece] = {}
    for name in checkpoint.names():
        new = name
        for pattern, other in OTHERS.items():
            new = re.sub(pattern, other, new)
        own = c.labels.names and new.startswith(c.head_names)
        if own or not UNUSED.search(new):
            pieces[new] = Piece((name,), checkpoint.spec(name)[1])
    pooling = c.pooling if c.labels.names else read_pooling(checkpoint.path, c.pooling)
    return replace(c, pooling=pooling), AdaptedCheckpoint(checkpoint, pieces)


MODEL = Encoder(config, weights, encode, pool, adapt)
ROBERTA = replace(MODEL, config=partial(
    config, offset=True, head=("classifier.dense", "classifier.out_proj"),
    defaults={"vocab_size": 50265, "pad_token_id": 1},
))  # fmt: skip
MPNET = replace(MODEL, config=partial(
    config, offset=True, kinds=False, buckets=True,
    head=("classifier.dense", "classifier.out_proj"),
    defaults={"vocab_size": 30527, "pad_token_id": 1,
              "relative_attention_num_buckets": 32},
))  # fmt: skip
