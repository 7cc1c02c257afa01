"""Vision encoder of Pixtral (Agrawal et al., 2024) as in Mistral 3: full attention.

Its patches are in squares, whose features a linear layer makes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.errors import CheckpointError
from inl.models import groups, mlp
from inl.models.config import flag, number, one_of, whole
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
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
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
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_channels": 3, "patch_size": 14,
    "hidden_act": "gelu", "spatial_merge_size": 2, "projector_hidden_act": "gelu",
    "rope_theta": 10000.0,
}  # fmt: skip
"""Defaults of fields of ``vision_config``, and of the whole model's."""
OF_WHOLE: Final = (
    "spatial_merge_size", "projector_hidden_act", "multimodal_projector_bias",
    "vision_feature_layer",
)  # fmt: skip
"""Fields that are not in ``vision_config``."""
NAMES: Final = {"vision_tower.": "", "multi_modal_projector.": "projector."}
"""Prefixes of tensors, and those of the weights below."""
EPS: Final = 1e-5
PATCH, MERGE = "patch_conv.weight", "projector.patch_merger.merging_layer.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(VisionSizes):
    """Sizes and constants of one checkpoint."""

    theta: float
    norm_eps: float
    last_activation: str
    bias: bool


class Weights(NamedTuple):
    """Parameters of the whole encoder."""

    patch: Linear | Group
    first_norm: Norm | Group
    layers: tuple[Layer[Norm], ...]
    norm: Norm | Group
    merge: Linear | Group
    first: Linear | Group
    second: Linear | Group


def fields(whole_model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the encoder in the config of the whole model."""
    text = whole_model.get("text_config") or {}
    vision = whole_model["vision_config"]
    rope = vision.get("rope_parameters") or {}
    found = {name: whole_model[name] for name in OF_WHOLE if name in whole_model}
    own = {
        "out_hidden_size": text.get("hidden_size", 5120),
        "rms_norm_eps": text.get("rms_norm_eps", EPS),
    }
    return with_defaults({**vision, **rope, **found, **own}, DEFAULTS)


def config(hf: Mapping[str, Any]) -> VisionConfig:
    """Read :func:`fields`; raises :class:`CheckpointError` naming the field."""
    hidden, heads = hidden_and_heads(hf, "num_attention_heads", 4)
    if hf.get("vision_feature_layer", -1) != -1:
        raise CheckpointError(
            "config field 'vision_feature_layer': found "
            f"{hf['vision_feature_layer']!r:.80}, accepted: -1, the last one"
        )
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        out_size=whole(hf, "out_hidden_size"),
        layers=whole(hf, "num_hidden_layers"),
        heads=heads,
        patch=whole(hf, "num_channels") * whole(hf, "patch_size") ** 2,
        merge=whole(hf, "spatial_merge_size") ** 2,
        theta=number(hf, "rope_theta", 10000.0),
        norm_eps=number(hf, "rms_norm_eps", EPS),
        activation=one_of(hf, "hidden_act", mlp.ACTIVATIONS),
        last_activation=one_of(hf, "projector_hidden_act", mlp.ACTIVATIONS),
        bias=flag(hf, "multimodal_projector_bias", False),
    )


def weights(c: VisionConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    h, out = c.hidden_size, c.out_size
    return Weights(
        groups.linear(PATCH.removesuffix(".weight"), h, c.patch),
        groups.norm("ln_pre", h),
        tuple(_layer(c, f"transformer.layers.{index}.") for index in range(c.layers)),
        groups.norm("projector.norm", h),
        groups.linear(MERGE.removesuffix(".weight"), h, c.merge * h),
        groups.linear("projector.linear_1", out, h, bias=c.bias),
        groups.linear("projector.linear_2", out, out, bias=c.bias),
    )


def _layer(c: VisionConfig, at: str) -> Layer[Norm]:
    h, inner = c.hidden_size, c.intermediate_size
    projections = {
        name: Param(f"{at}attention.{name}_proj.weight", (h, h)) for name in "qkv"
    }
    up, gate = (
        groups.linear(f"{at}feed_forward.{name}_proj", inner, h)
        for name in ("up", "gate")
    )
    down = groups.linear(f"{at}feed_forward.down_proj", h, inner)
    return Layer(
        groups.norm(f"{at}attention_norm", h),
        Group("qkv_linear", **projections),
        groups.linear(f"{at}attention.o_proj", h, h),
        groups.norm(f"{at}ffn_norm", h),
        mlp.OpenMlp(up, down, gate),
    )


def turning(dim: int, theta: float) -> RopeScaling:
    """Return the rotation of heads: even planes turn by rows, odd ones by columns.

    Planes of one axis are next to each other.
    """
    usual = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    divisors = usual / np.concatenate([usual[::2], usual[1::2]])
    axes = (0,) * (dim // 4) + (1,) * (dim // 4)
    return RopeScaling("divided", divisors=tuple(divisors.tolist()), axes=axes)


def begin(
    ops: Ops, c: VisionConfig, w: Weights, batch: SequenceBatch
) -> tuple[Array, ...]:
    """Return the hidden states [T, H] of patches in squares.

    Behind them are the tables of the rotation.
    """
    x = ops.rms_norm(ops.linear(batch.tokens, w.patch), w.first_norm, eps=EPS)
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
    y = ops.rms_norm(x, own.norm, eps=EPS)
    x = x + attention(ops, c, own, y, batch.starts, (cos, sin))
    y = ops.rms_norm(x, own.mlp_norm, eps=EPS)
    x = x + mlp.feed_forward(ops, y, own.mlp, c.activation)
    return x, cos, sin


def pool(
    ops: Ops, c: VisionConfig, w: Weights, hidden: tuple[Array, ...],
    _batch: SequenceBatch,
) -> Array:  # fmt: skip
    """Return the features [T / merge, out] of squares of patches."""
    x = ops.rms_norm(hidden[0], w.norm, eps=c.norm_eps)
    x = x.reshape(x.shape[0] // c.merge, c.merge * c.hidden_size)
    x = ops.linear(ops.linear(x, w.merge), w.first)
    return ops.linear(ops.activate(x, kind=c.last_activation), w.second)


def adapt(c: VisionConfig, checkpoint: Checkpoint) -> tuple[Any, AdaptedCheckpoint]:
    """Make the convolution a matrix, and order the columns of squares by patches."""
    h = c.hidden_size

    def by_patch(stored: Sequence[HostArray]) -> HostArray:
        data = stored[0].data.reshape(h, h, c.merge).swapaxes(1, 2)
        return replace(stored[0], data=np.ascontiguousarray(data).reshape(h, -1))

    changes = {PATCH: flat_patches(c), MERGE: ((h, c.merge * h), by_patch)}
    return c, changed(checkpoint, changes)


def specs(c: VisionConfig, bucket: Bucket) -> SequenceBatch:
    """Return the specs of a batch."""
    tokens, int32 = bucket.tokens, partial(StrictArray, dtype="int32")
    return SequenceBatch(
        tokens=StrictArray((tokens, c.patch), c.dtype),
        positions=int32((2, tokens)),
        kinds=int32((tokens,)),
        starts=int32((bucket.rows + 1,)),
    )


def image_batch(
    c: VisionConfig, images: Sequence[Patches], bucket: Bucket
) -> tuple[SequenceBatch, NDArray[np.intp]]:
    """Return the batch of images in the size of a bucket, and the order of features."""
    places = [squares(grid, c.merge).reshape(2, -1) for _, grid in images]
    batch = SequenceBatch(
        tokens=padded([values for values, _ in images], bucket.tokens),
        positions=padded(places, bucket.tokens, axis=1).astype(np.int32),
        kinds=np.zeros(bucket.tokens, np.int32),
        starts=sequence_starts([len(values) for values, _ in images], bucket.rows),
    )
    return batch, np.arange(sum(len(values) for values, _ in images) // c.merge)


LAYERS: Final = EncoderLayers(begin, layer)
MODEL = Encoder(config, weights, LAYERS.encode, pool, adapt, specs=specs, layers=LAYERS)
