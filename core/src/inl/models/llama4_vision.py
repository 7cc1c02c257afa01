"""Vision encoder of Llama 4 (Meta, 2025): tiles of one size, each with a class token.

Heads turn by columns in their first planes and by rows in the others; squares of
patches become features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.dtypes import HostArray, widen, wrap
from inl.errors import CheckpointError
from inl.models import groups, layer_norm, mlp
from inl.models.config import fields_of, number, refuse_unless, whole
from inl.models.fields import with_defaults
from inl.models.gemma4_vision import turning
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
from inl.spec.weights import Group, Param, RowSlices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.checkpoint import Checkpoint
    from inl.images.qwen_patches import Patches
    from inl.ops.protocol import Ops
    from inl.spec.step import Bucket

DEFAULTS: Final = {
    "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 448, "patch_size": 14,
    "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096,
    "projector_output_dim": 4096, "vision_output_dim": 7680,
}  # fmt: skip
"""Defaults of fields of ``vision_config``."""
NAMES: Final = {"vision_model.": "", "multi_modal_projector.": "projector."}
"""Prefixes of tensors, and those of the weights below."""
THETA: Final = 10000.0
"""Default base frequency of the rotation."""
EPS: Final = 1e-5
"""Of the norms, whatever the config has."""
CLASS, TABLE = "class_embedding", "positional_embedding_vlm"
PLACES: Final = "places.weight"
"""The table of places, with the class token at its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(VisionSizes):
    """Sizes and constants of one checkpoint."""

    side: int
    """Patches of a side of a tile."""
    inner_size: int
    """Lanes between the two layers that follow the squares."""
    features_size: int
    """Lanes of what is projected to the language model."""
    theta: float


class Weights(NamedTuple):
    """Parameters of the whole encoder."""

    patch: Linear | Group
    places: Embedding | Group
    first_norm: LayerNorm | Group
    layers: tuple[Layer[LayerNorm], ...]
    norm: LayerNorm | Group
    first: Linear | Group
    second: Linear | Group
    out: Linear | Group


def fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the encoder in the config of the whole model."""
    hf = with_defaults(model["vision_config"], DEFAULTS)
    ratio = number(hf, "pixel_shuffle_ratio", 0.5, most=1.0)
    text = model.get("text_config") or {}
    return hf.changed({
        "merge_size": round(1 / ratio), "out": whole(text, "hidden_size", 5120),
    })  # fmt: skip


def config(hf: Mapping[str, Any]) -> VisionConfig:
    """Read the fields; raises :class:`CheckpointError` naming the field."""
    refuse_unless(hf, "hidden_act", "gelu")
    refuse_unless(hf, "multi_modal_projector_bias", False)
    hidden, heads = hidden_and_heads(hf, "num_attention_heads", 4)
    size, merge = whole(hf, "patch_size"), whole(hf, "merge_size")
    side, inner = whole(hf, "image_size") // size, whole(hf, "projector_input_dim")
    features = whole(hf, "projector_output_dim")
    widths = whole(hf, "intermediate_size"), inner, whole(hf, "vision_output_dim")
    if side % merge or widths != (merge**2 * hidden, features, features):
        raise CheckpointError(
            f"config field 'vision_config.intermediate_size': found {widths} lanes of "
            f"projections from squares of {merge} x {merge} of {hidden} lanes to "
            f"{features}, and tiles of {side} patches a side; accepted: layers that "
            "fit to each other, and whole squares"
        )
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=widths[0],
        out_size=whole(hf, "out"),
        layers=whole(hf, "num_hidden_layers"),
        heads=heads,
        patch=whole(hf, "num_channels") * size**2,
        merge=merge**2,
        activation="gelu",
        side=side,
        inner_size=inner,
        features_size=features,
        theta=number(fields_of(hf, "rope_parameters"), "rope_theta",
                     number(hf, "rope_theta", THETA)),
    )  # fmt: skip


def weights(c: VisionConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    h, linear = c.hidden_size, groups.linear
    return Weights(
        linear("patch_embedding.linear", h, c.patch),
        Group("embedding", weight=Param(PLACES, (c.side**2 + 1, h))),
        layer_norm.norm("layernorm_pre", h, bias=True),
        tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers)),
        layer_norm.norm("layernorm_post", h, bias=True),
        linear("vision_adapter.mlp.fc1", c.inner_size, c.merge * h),
        linear("vision_adapter.mlp.fc2", c.features_size, c.inner_size),
        linear("projector.linear_1", c.out_size, c.features_size),
    )


def _layer(c: VisionConfig, at: str) -> Layer[LayerNorm]:
    h, inner, dim = c.hidden_size, c.intermediate_size, c.hidden_size // c.heads
    rows = RowSlices(groups.rotary_rows(dim, dim, c.heads, interleaved=True), h)
    projections: dict[str, Param] = {}
    for name in "qkv":
        order = None if name == "v" else rows
        own = groups.linear(f"{at}self_attn.{name}_proj", h, h, bias=True).params
        projections[name] = own["weight"]._replace(row_slices=order)
        projections[f"{name}_bias"] = own["bias"]._replace(row_slices=order)
    return Layer(
        layer_norm.norm(f"{at}input_layernorm", h, bias=True),
        Group("qkv_linear", **projections),
        groups.linear(f"{at}self_attn.o_proj", h, h, bias=True),
        layer_norm.norm(f"{at}post_attention_layernorm", h, bias=True),
        mlp.OpenMlp(
            groups.linear(f"{at}mlp.fc1", inner, h, bias=True),
            groups.linear(f"{at}mlp.fc2", h, inner, bias=True),
        ),
    )


def begin(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Return the hidden states [T, H] of patches, and the tables of the rotation.

    The last token of each tile is its class token, whose patch is zeros and which does
    not turn. ``batch.kinds`` has the rows of the table of places.
    """
    x = ops.linear(batch.tokens, w.patch) + ops.embedding(batch.kinds, w.places)
    x = ops.layer_norm(x, w.first_norm, eps=EPS)
    dim = c.hidden_size // c.heads
    cos, sin = ops.axis_rope_table(
        batch.positions, dim=dim, theta=c.theta, scaling=turning(dim, c.theta)
    )
    return x, cos, sin


def layer(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch,
    arrays: tuple[Array, ...], index: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the arrays of :func:`begin` after a layer."""
    (x, cos, sin), own = arrays, w.layers[index]
    y = ops.layer_norm(x, own.norm, eps=EPS)
    x = x + attention(ops, c, own, y, batch.starts, (cos, sin))
    y = ops.layer_norm(x, own.mlp_norm, eps=EPS)
    return x + mlp.feed_forward(ops, y, own.mlp, c.activation), cos, sin


def pool(
    ops: Ops, c: VisionConfig, w: Weights, arrays: tuple[Array, ...],
    batch: SequenceBatch,
) -> Array:  # fmt: skip
    """Return the features [T / merge, out] of squares of patches.

    ``batch.windows`` has the indices of the patches, without class tokens.
    """
    assert batch.windows is not None, "image_batch() gives them"
    x = ops.take_rows(ops.layer_norm(arrays[0], w.norm, eps=EPS), batch.windows)
    x = x.reshape(x.shape[0] // c.merge, c.merge * c.hidden_size)
    x = ops.activate(ops.linear(x, w.first), kind="gelu")
    x = ops.activate(ops.linear(x, w.second), kind="gelu")
    return ops.linear(x, w.out)


def adapt(c: VisionConfig, checkpoint: Checkpoint) -> tuple[Any, AdaptedCheckpoint]:
    """Add the class token to its place."""
    pieces = {
        name: Piece((name,), checkpoint.spec(name)[1]) for name in checkpoint.names()
    }

    def joined(stored: Sequence[HostArray]) -> HostArray:
        table, added = (widen(each).astype(np.float32) for each in stored)
        table = table.copy()
        table[-1] += added
        return wrap(table)

    if CLASS in pieces and TABLE in pieces:
        shape = c.side**2 + 1, c.hidden_size
        pieces[PLACES] = Piece((TABLE, CLASS), shape, joined)
        del pieces[CLASS], pieces[TABLE]
    return c, AdaptedCheckpoint(checkpoint, pieces)


def specs(c: VisionConfig, bucket: Bucket) -> SequenceBatch:
    """Return the specs of a batch."""
    tokens, int32 = bucket.tokens, partial(StrictArray, dtype="int32")
    return SequenceBatch(
        tokens=StrictArray((tokens, c.patch), c.dtype),
        positions=int32((2, tokens)),
        kinds=int32((tokens,)),
        starts=int32((bucket.rows + 1,)),
        windows=int32((tokens // c.merge * c.merge,)),
    )


def image_batch(
    c: VisionConfig, images: Sequence[Patches], bucket: Bucket
) -> tuple[SequenceBatch, NDArray[np.intp]]:
    """Return the batch of images in the size of a bucket, and the order of features."""
    count, width = c.side**2, c.patch
    tiles = [values.reshape(-1, count, width) for values, _ in images]
    tokens = np.pad(np.concatenate(tiles), ((0, 0), (0, 1), (0, 0)))
    many = len(tokens)
    rows, columns = squares((c.side, c.side), c.merge).reshape(2, -1)
    # A class token is at 0, where nothing turns; patches begin at 1.
    places = np.stack([np.append(columns + 1, 0), np.append(rows + 1, 0)])
    kinds = np.append(rows * c.side + columns, count)
    used = np.arange(many * (count + 1)).reshape(many, -1)[:, :-1].ravel()
    batch = SequenceBatch(
        tokens=padded([tokens.reshape(-1, width)], bucket.tokens),
        positions=padded([np.tile(places, many)], bucket.tokens, axis=1).astype(
            np.int32
        ),
        kinds=padded([np.tile(kinds, many)], bucket.tokens).astype(np.int32),
        starts=sequence_starts([count + 1] * many, bucket.rows),
        windows=padded([used], bucket.tokens // c.merge * c.merge).astype(np.int32),
    )
    return batch, np.arange(many * count // c.merge)


LAYERS: Final = EncoderLayers(begin, layer)
MODEL = Encoder(config, weights, LAYERS.encode, pool, adapt, specs=specs, layers=LAYERS)
