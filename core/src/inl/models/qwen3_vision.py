"""Vision encoder of Qwen3-VL (Qwen team, 2025): learned places, features of layers.

Beside the features of the last layer it has those of some layers before, which the
first layers of the language model add (DeepStack, Meng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    padded,
    sequence_starts,
    squares,
)
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm
from inl.spec.encoder import Encoder, EncoderLayers, SequenceBatch
from inl.spec.step import Array
from inl.spec.strict_array import StrictArray
from inl.spec.weights import Group

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.images.qwen_patches import Patches
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
    has_corners: bool = True
    """Whether corners of the table are at patches in the corners of images; else whole
    images lie on the whole table."""


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


def begin(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Return the hidden states [T, H] of patches, and the tables of the rotation.

    Layers append the states that are tapped. ``batch.kinds`` has the rows of the table
    of places [taps, T], and ``batch.weights`` their weights [taps, T, 1].
    """
    x = ops.linear(batch.tokens, w.patch)
    assert batch.weights is not None, "image_batch() gives them"
    for tap in range(TAPS):
        place = ops.embedding(batch.kinds[tap], w.places)
        x = x + place * batch.weights[tap]
    dim = c.hidden_size // c.heads
    cos, sin = ops.axis_rope_table(
        batch.positions, dim=dim, theta=THETA, scaling=turning(dim)
    )
    return x, cos, sin


def layer(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch,
    arrays: tuple[Array, ...], index: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the arrays of :func:`begin` after a layer."""
    x, cos, sin, *tapped = arrays
    own = w.layers[index]
    y = ops.layer_norm(x, own.norm, eps=EPS)
    x = x + attention(ops, c, own, y, batch.starts, (cos, sin))
    y = ops.layer_norm(x, own.mlp_norm, eps=EPS)
    x = x + mlp.feed_forward(ops, y, own.mlp, c.activation)
    return x, cos, sin, *tapped, *([x] if index in c.tapped else [])


def pool(
    ops: Ops, c: VisionConfig, w: Weights, hidden: tuple[Array, ...],
    _batch: SequenceBatch,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the features [T / merge, out] of each of the hidden states."""
    last, _cos, _sin, *tapped = hidden

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
    c: VisionConfig, images: Sequence[Patches], bucket: Bucket
) -> tuple[SequenceBatch, NDArray[np.intp]]:
    """Return the batch of images in the size of a bucket, and the order of features."""
    places = [squares(grid, c.merge).reshape(2, -1) for _, grid in images]
    tapped = [
        _table_taps(c, place, grid)
        for place, (_, grid) in zip(places, images, strict=True)
    ]
    batch = SequenceBatch(
        tokens=padded([values for values, _ in images], bucket.tokens),
        positions=padded(places, bucket.tokens, axis=1).astype(np.int32),
        kinds=padded([rows for rows, _ in tapped], bucket.tokens, axis=1),
        starts=sequence_starts([len(values) for values, _ in images], bucket.rows),
        weights=padded([shares for _, shares in tapped], bucket.tokens, axis=1),
    )
    return batch, np.arange(sum(len(values) for values, _ in images) // c.merge)


def _table_taps(
    c: VisionConfig, places: NDArray[np.intp], grid: tuple[int, int]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return rows of the table [TAPS, T] and their weights [TAPS, T, 1] of places."""
    (above, above_share), (left, left_share) = (
        _taps(c, place.astype(np.int32), size)
        for place, size in zip(places, grid, strict=True)
    )
    rows = above[:, None] * c.side + left
    shares = (above_share[:, None] * left_share).astype(np.float32)
    return rows.reshape(TAPS, -1), shares.reshape(TAPS, -1, 1)


def _taps(c: VisionConfig, places: NDArray[np.int32], size: int) -> tuple[Any, Any]:
    """Return the two rows of a table next to each place, and their weights [2, T]."""
    if c.has_corners:
        at = places.astype(np.float32) * (c.side - 1) / np.float32(max(size - 1, 1))
    else:
        half = np.float32(0.5)
        at = (places.astype(np.float32) + half) * c.side / np.float32(size) - half
    first = np.floor(at).astype(np.int32)
    share = at - first
    taps = np.clip([first, first + 1], 0, c.side - 1)
    return taps, np.stack([1 - share, share])


LAYERS: Final = EncoderLayers(begin, layer)
MODEL = Encoder(
    config, weights, LAYERS.encode, pool, qwen25_vision.adapt, specs=specs,
    layers=LAYERS,
)  # fmt: skip
