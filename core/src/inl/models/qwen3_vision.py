"""Vision encoder of Qwen3-VL (Qwen team, 2025): learned places, features of layers.

Beside the features of the last layer it has those of some layers before, which the
first layers of the language model add (DeepStack, Meng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.errors import CheckpointError
from inl.models import groups, layer_norm, mlp, qwen25_vision
from inl.models.config import one_of, whole
from inl.models.fields import with_defaults
from inl.models.qwen25_vision import EPS, THETA, turning
from inl.models.vision_layers import (
    Layer,
    VisionSizes,
    attention,
    hidden_and_heads,
    squares,
)
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm
from inl.spec.encoder import Encoder, SequenceBatch
from inl.spec.step import Array
from inl.spec.strict_array import StrictArray
from inl.spec.weights import Group

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.ops.protocol import Ops
    from inl.spec.step import Bucket

DEFAULTS: Final = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}  # fmt: skip
"""Defaults of fields of ``vision_config``."""
TAPPED: Final = (8, 16, 24)
"""Default layers whose features are added in the language model."""
TAPS: Final = 4
"""Rows of the table of places that each patch interpolates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(VisionSizes):
    """Sizes and constants of one checkpoint."""

    side: int
    """Rows and columns of the table of places."""
    tapped: tuple[int, ...]


class Merger(NamedTuple):
    """Parameters of what makes features of squares of patches."""

    norm: LayerNorm | Group
    first: Linear | Group
    second: Linear | Group


class Weights(NamedTuple):
    """Parameters of the whole encoder."""

    patch: Linear | Group
    places: Embedding | Group
    layers: tuple[Layer[LayerNorm], ...]
    merger: Merger
    tapped: tuple[Merger, ...]


def config(hf: Mapping[str, Any]) -> VisionConfig:
    """Read a ``vision_config``; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    hidden, heads = hidden_and_heads(hf, "num_heads", 4)
    layers, places = whole(hf, "depth"), whole(hf, "num_position_embeddings")
    side = int(places**0.5 + 0.5)
    if side**2 != places:
        raise CheckpointError(
            "config field 'vision_config.num_position_embeddings': found "
            f"{places}, expected a square"
        )
    tapped = hf.get("deepstack_visual_indexes", TAPPED)
    if not isinstance(tapped, list | tuple) or not all(
        type(at) is int and 0 <= at < layers for at in tapped
    ):
        raise CheckpointError(
            "config field 'vision_config.deepstack_visual_indexes': found "
            f"{tapped!r:.80}, expected layers of {layers}"
        )
    size = whole(hf, "patch_size")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        out_size=whole(hf, "out_hidden_size"),
        layers=layers,
        heads=heads,
        patch=whole(hf, "in_channels") * whole(hf, "temporal_patch_size") * size**2,
        merge=whole(hf, "spatial_merge_size") ** 2,
        side=side,
        tapped=tuple(tapped),
        activation=one_of(hf, "hidden_act", mlp.ACTIVATIONS),
    )


def weights(c: VisionConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    table = groups.linear("pos_embed", c.side**2, c.hidden_size)
    return Weights(
        groups.linear("patch_embed.proj", c.hidden_size, c.patch, bias=True),
        Group("embedding", **table.params),
        tuple(_layer(c, f"blocks.{index}.") for index in range(c.layers)),
        _merger(c, "merger", c.hidden_size),
        tuple(
            _merger(c, f"deepstack_merger_list.{index}", c.merge * c.hidden_size)
            for index in range(len(c.tapped))
        ),
    )


def _layer(c: VisionConfig, at: str) -> Layer[LayerNorm]:
    h, inner = c.hidden_size, c.intermediate_size
    return Layer(
        layer_norm.norm(f"{at}norm1", h, bias=True),
        qwen25_vision.qkv(h, f"{at}attn.qkv"),
        groups.linear(f"{at}attn.proj", h, h, bias=True),
        layer_norm.norm(f"{at}norm2", h, bias=True),
        mlp.OpenMlp(
            groups.linear(f"{at}mlp.linear_fc1", inner, h, bias=True),
            groups.linear(f"{at}mlp.linear_fc2", h, inner, bias=True),
        ),
    )


def _merger(c: VisionConfig, at: str, normed: int) -> Merger:
    """normed: lanes of the norm, of a patch or of all patches of a feature."""
    wide = c.merge * c.hidden_size
    return Merger(
        layer_norm.norm(f"{at}.norm", normed, bias=True),
        groups.linear(f"{at}.linear_fc1", wide, wide, bias=True),
        groups.linear(f"{at}.linear_fc2", c.out_size, wide, bias=True),
    )


def encode(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Return the hidden states [T, H] of the last layer and of those that are tapped.

    ``batch.kinds`` has the rows of the table of places [taps, T], and
    ``batch.weights`` their weights [taps, T, 1].
    """
    x = ops.linear(batch.tokens, w.patch)
    assert batch.weights is not None, "image_batch() gives them"
    for tap in range(TAPS):
        place = ops.embedding(batch.kinds[tap], w.places)
        x = x + place * batch.weights[tap]
    dim = c.hidden_size // c.heads
    rope = ops.axis_rope_table(
        batch.positions, dim=dim, theta=THETA, scaling=turning(dim)
    )
    tapped = []
    for index, layer in enumerate(w.layers):
        y = ops.layer_norm(x, layer.norm, eps=EPS)
        x = x + attention(ops, c, layer, y, batch.starts, rope)
        y = ops.layer_norm(x, layer.mlp_norm, eps=EPS)
        x = x + mlp.feed_forward(ops, y, layer.mlp, c.activation)
        if index in c.tapped:
            tapped.append(x)
    return x, *tapped


def pool(
    ops: Ops, c: VisionConfig, w: Weights, hidden: tuple[Array, ...],
    _batch: SequenceBatch,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the features [T / merge, out] of each of the hidden states."""
    last, *tapped = hidden

    def merged(x: Array, w: Merger) -> Array:
        inner = ops.activate(ops.linear(x, w.first), kind="gelu")
        return ops.linear(inner, w.second)

    def joined(x: Array) -> Array:
        return x.reshape(x.shape[0] // c.merge, c.merge * c.hidden_size)

    first = joined(ops.layer_norm(last, w.merger.norm, eps=EPS))
    return merged(first, w.merger), *(
        merged(ops.layer_norm(joined(x), each.norm, eps=EPS), each)
        for x, each in zip(tapped, w.tapped, strict=True)
    )


def specs(c: VisionConfig, bucket: Bucket) -> SequenceBatch:
    """Return the specs of a batch."""
    tokens, int32 = bucket.tokens, partial(StrictArray, dtype="int32")
    return SequenceBatch(
        tokens=StrictArray((tokens, c.patch), c.dtype),
        positions=int32((2, tokens)),
        kinds=int32((TAPS, tokens)),
        starts=int32((bucket.rows + 1,)),
        weights=StrictArray((TAPS, tokens, 1), c.dtype),
    )


def image_batch(
    c: VisionConfig, values: NDArray[np.float32], grid: tuple[int, int], bucket: Bucket
) -> tuple[SequenceBatch, NDArray[np.intp]]:
    """Return the batch of an image in the size of a bucket, and the order of features.

    values: patches [T, patch] in squares. grid: rows and columns of patches.
    """
    used = len(values)
    tokens = np.zeros((bucket.tokens, c.patch), np.float32)
    positions = np.zeros((2, bucket.tokens), np.int32)
    rows = np.zeros((TAPS, bucket.tokens), np.int32)
    weights = np.zeros((TAPS, bucket.tokens, 1), np.float32)
    tokens[:used] = values
    positions[:, :used] = squares(grid, c.merge).reshape(2, used)
    (above, above_share), (left, left_share) = (
        _taps(place, size, c.side)
        for place, size in zip(positions[:, :used], grid, strict=True)
    )
    rows[:, :used] = (above[:, None] * c.side + left).reshape(TAPS, used)
    shares = above_share[:, None] * left_share
    weights[:, :used, 0] = shares.reshape(TAPS, used)
    batch = SequenceBatch(
        tokens=tokens,
        positions=positions,
        kinds=rows,
        starts=np.array([0] + [used] * bucket.rows, np.int32),
        weights=weights,
    )
    return batch, np.arange(used // c.merge)


def _taps(places: NDArray[np.int32], size: int, side: int) -> tuple[Any, Any]:
    """Return the two rows of a table next to each place, and their weights [2, T]."""
    at = places.astype(np.float32) * (side - 1) / np.float32(max(size - 1, 1))
    first = np.floor(at).astype(np.int32)
    share = at - first
    return np.minimum([first, first + 1], side - 1), np.stack([1 - share, share])


MODEL = Encoder(config, weights, encode, pool, qwen25_vision.adapt, specs=specs)
