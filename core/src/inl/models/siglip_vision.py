"""SigLIP (Zhai et al., 2023) as the vision encoder of Gemma 3, Idefics3 and SmolVLM.

Each square of an image is a sequence, whose patches are in squares of their own: each
of these becomes one feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.dtypes import rounded
from inl.errors import CheckpointError
from inl.models import groups, layer_norm, mlp
from inl.models.config import number, one_of, whole
from inl.models.fields import with_defaults
from inl.models.vision_layers import (
    Layer,
    VisionSizes,
    attention,
    changed,
    flat_patches,
    hidden_and_heads,
    padded,
    sequence_starts,
    squares,
)
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm, Norm
from inl.spec.encoder import Encoder, EncoderLayers, SequenceBatch
from inl.spec.step import Array
from inl.spec.strict_array import StrictArray
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.checkpoints.adapted import AdaptedCheckpoint
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.dtypes import HostArray
    from inl.images.qwen_patches import Patches
    from inl.ops.protocol import Ops
    from inl.spec.step import Bucket

DEFAULTS: Final = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
"""Defaults of fields of ``vision_config`` of Gemma 3."""
TILE_DEFAULTS: Final = {
    **DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32,
}  # fmt: skip
"""Those of Idefics3."""
GEMMA_NAMES: Final = {
    "vision_tower.vision_model.": "", "vision_tower.": "",
    "multi_modal_projector.": "projector.",
}  # fmt: skip
TILE_NAMES: Final = {"vision_model.": "", "connector.": "projector."}
"""Prefixes of tensors, and those of the weights below."""
PATCH: Final = "embeddings.patch_embedding.weight"
GEMMA_OUT: Final = "projector.mm_input_projection_weight"
"""Of [hidden, out], other than those of linear layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(VisionSizes):
    """Sizes and constants of one checkpoint."""

    side: int
    """Rows and columns of the table of places."""
    averages: bool
    """Whether a feature is the mean of its patches; else all of them are projected."""
    eps: float


class Weights(NamedTuple):
    """Parameters of the whole encoder."""

    patch: Linear | Group
    places: Embedding | Group
    layers: tuple[Layer[LayerNorm], ...]
    norm: LayerNorm | Group
    mean_norm: Norm | Group | None
    out: Linear | Group


def gemma_fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the encoder in the config of Gemma 3."""
    hf = with_defaults(model["vision_config"], DEFAULTS)
    side = whole(hf, "image_size") // whole(hf, "patch_size")
    features = whole(model, "mm_tokens_per_image", 256)
    own = int(features**0.5 + 0.5)
    if own**2 != features or not own or side % own:
        raise CheckpointError(
            f"config field 'mm_tokens_per_image': found {features}, expected the "
            f"square of a divisor of {side}, the patches of a side"
        )
    out = whole(model.get("text_config") or {}, "hidden_size", 2304)
    return hf.changed({"merge_size": side // own, "averages": True, "out": out})


def tile_fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the encoder in the config of Idefics3."""
    hf = with_defaults(model["vision_config"], TILE_DEFAULTS)
    out = whole(model.get("text_config") or {}, "hidden_size", 4096)
    merge = whole(model, "scale_factor", 2)
    return hf.changed({"merge_size": merge, "averages": False, "out": out})


def config(hf: Mapping[str, Any]) -> VisionConfig:
    """Read the fields; raises :class:`CheckpointError` naming the field."""
    hidden, heads = hidden_and_heads(hf, "num_attention_heads", 1)
    size = whole(hf, "patch_size")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        out_size=whole(hf, "out"),
        layers=whole(hf, "num_hidden_layers"),
        heads=heads,
        patch=whole(hf, "num_channels") * size**2,
        merge=whole(hf, "merge_size") ** 2,
        side=whole(hf, "image_size") // size,
        averages=bool(hf["averages"]),
        eps=number(hf, "layer_norm_eps", 1e-6),
        activation=one_of(hf, "hidden_act", mlp.ACTIVATIONS),
    )


def weights(c: VisionConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    h, out = c.hidden_size, c.out_size
    table = groups.linear("embeddings.position_embedding", c.side**2, h)
    if c.averages:
        norm = groups.norm("projector.mm_soft_emb_norm", h, offset=1.0)
        last = Group("linear", weight=Param(GEMMA_OUT, (out, h)))
    else:
        norm, wide = None, c.merge * h
        last = groups.linear("projector.modality_projection.proj", out, wide)
    return Weights(
        groups.linear(PATCH.removesuffix(".weight"), h, c.patch, bias=True),
        Group("embedding", **table.params),
        tuple(
            layer_weights(c, f"encoder.layers.{index}.") for index in range(c.layers)
        ),
        layer_norm.norm("post_layernorm", h, bias=True),
        norm,
        last,
    )


def layer_weights(c: VisionSizes, at: str) -> Layer[LayerNorm]:
    """Return the weight tree of the layer with the name prefix ``at``."""
    h, inner = c.hidden_size, c.intermediate_size
    projections: dict[str, Param] = {}
    for name in "qkv":
        own = groups.linear(f"{at}self_attn.{name}_proj", h, h, bias=True).params
        projections |= {name: own["weight"], f"{name}_bias": own["bias"]}
    return Layer(
        layer_norm.norm(f"{at}layer_norm1", h, bias=True),
        Group("qkv_linear", **projections),
        groups.linear(f"{at}self_attn.out_proj", h, h, bias=True),
        layer_norm.norm(f"{at}layer_norm2", h, bias=True),
        mlp.OpenMlp(
            groups.linear(f"{at}mlp.fc1", inner, h, bias=True),
            groups.linear(f"{at}mlp.fc2", h, inner, bias=True),
        ),
    )


def begin(
    ops: Ops, _c: VisionConfig, w: Weights, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Return the hidden states [T, H] of patches in squares.

    ``batch.kinds`` has their rows of the table of places.
    """
    return (ops.linear(batch.tokens, w.patch) + ops.embedding(batch.kinds, w.places),)


def layer(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch,
    arrays: tuple[Array, ...], index: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Return the hidden states after a layer."""
    (x,), own = arrays, w.layers[index]
    y = ops.layer_norm(x, own.norm, eps=c.eps)
    x = x + attention(ops, c, own, y, batch.starts)
    y = ops.layer_norm(x, own.mlp_norm, eps=c.eps)
    return (x + mlp.feed_forward(ops, y, own.mlp, c.activation),)


def pool(
    ops: Ops, c: VisionConfig, w: Weights, arrays: tuple[Array, ...],
    batch: SequenceBatch,
) -> Array:  # fmt: skip
    """Return the features [T / merge, out] of squares of patches.

    Those of Gemma 3 are divided by what it multiplies all embeddings with.
    """
    hidden = ops.layer_norm(arrays[0], w.norm, eps=c.eps)
    if w.mean_norm is not None:
        x = ops.pool(hidden, batch.windows, kind="mean")
        x = ops.rms_norm(x, w.mean_norm, eps=c.eps)
        scale = float(rounded(np.array(c.out_size**0.5, np.float32), c.dtype))
        return ops.linear(x, w.out) * (1 / scale)
    x = hidden.reshape(hidden.shape[0] // c.merge, c.merge * c.hidden_size)
    return ops.linear(x, w.out)


def adapt(c: VisionConfig, checkpoint: Checkpoint) -> tuple[Any, AdaptedCheckpoint]:
    """Make the convolution a matrix, and turn the last one of Gemma 3."""

    def turned(stored: Sequence[HostArray]) -> HostArray:
        data = np.ascontiguousarray(stored[0].data.T)
        return replace(stored[0], data=data, shape=data.shape)

    shape = c.out_size, c.hidden_size
    changes = {PATCH: flat_patches(c), GEMMA_OUT: (shape, turned)}
    return c, changed(checkpoint, changes)


def specs(c: VisionConfig, bucket: Bucket) -> SequenceBatch:
    """Return the specs of a batch."""
    tokens, int32 = bucket.tokens, partial(StrictArray, dtype="int32")
    return SequenceBatch(
        tokens=StrictArray((tokens, c.patch), c.dtype),
        positions=int32((tokens,)),
        kinds=int32((tokens,)),
        starts=int32((bucket.rows + 1,)),
        windows=int32((tokens // c.merge + 1,)),
    )


def image_batch(
    c: VisionConfig, images: Sequence[Patches], bucket: Bucket
) -> tuple[SequenceBatch, NDArray[np.intp]]:
    """Return the batch of images in the size of a bucket, and the order of features.

    Patches are those of tiles and of the whole image. A grid counts those of all tiles;
    there are none if these are all patches.
    """
    kinds, lengths = [], []
    for values, grid in images:
        tile = isqrt(len(values) - grid[0] * grid[1]) or grid[0]
        places = np.arange(tile) if c.averages else _places(tile, c.side)
        rows, columns = places[squares((tile, tile), c.merge)]
        count = len(values) // tile**2
        kinds.append(np.tile((rows * c.side + columns).ravel(), count))
        lengths += [tile**2] * count
    used = sum(lengths)
    windows = np.minimum(np.arange(bucket.tokens // c.merge + 1) * c.merge, used)
    batch = SequenceBatch(
        tokens=padded([values for values, _ in images], bucket.tokens),
        positions=np.zeros(bucket.tokens, np.int32),
        kinds=padded(kinds, bucket.tokens).astype(np.int32),
        starts=sequence_starts(lengths, bucket.rows),
        windows=windows.astype(np.int32),
    )
    return batch, np.arange(used // c.merge)


def _places(count: int, side: int) -> NDArray[np.intp]:
    """Return the rows of a table of ``side`` for ``count`` patches in a line.

    Idefics3 finds them by fractions in float32, whose rounding decides at the bounds.
    """
    bounds = (np.arange(1, side) * (1 / side)).astype(np.float32)
    at = np.arange(count, dtype=np.float32) * np.float32(1 / count)
    return np.searchsorted(bounds, at, side="right")


LAYERS: Final = EncoderLayers(begin, layer)
MODEL = Encoder(config, weights, LAYERS.encode, pool, adapt, specs=specs, layers=LAYERS)
