"""Vision encoder of PaddleOCR-VL (Baidu, 2025): SigLIP on images of any size.

Its layers are those of Qwen3-VL with other names; the table of places is interpolated
between the centers of patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.errors import CheckpointError
from inl.models import groups, layer_norm, mlp, qwen3_vision, siglip_vision
from inl.models.config import fields_of, number, one_of, refuse_unless, whole
from inl.models.fields import with_defaults
from inl.models.qwen3_vision import VisionConfig
from inl.models.qwen25_vision import EPS, THETA
from inl.models.vision_layers import Layer, changed, flat_patches, hidden_and_heads
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm
from inl.spec.encoder import Encoder, EncoderLayers, SequenceBatch
from inl.spec.step import Array
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.checkpoints.adapted import AdaptedCheckpoint
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 384, "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh", "spatial_merge_size": 2,
}  # fmt: skip
"""Defaults of fields of ``vision_config``."""
NAMES: Final = {
    "visual.vision_model.": "", "mlp_AR.": "projector.", "projector.": "projector.",
}  # fmt: skip
"""Prefixes of tensors, and those of the weights below."""
FIRST_EPS: Final = 1e-5
"""Of the norm before the patches of a feature are joined."""


class Weights(NamedTuple):
    """Parameters of the whole encoder."""

    patch: Linear | Group
    places: Embedding | Group
    layers: tuple[Layer[LayerNorm], ...]
    norm: LayerNorm | Group
    first_norm: LayerNorm | Group
    first: Linear | Group
    second: Linear | Group


def fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the encoder in the config of the whole model."""
    hf = with_defaults(model["vision_config"], DEFAULTS)
    text = model.get("text_config") or model
    # Images are single frames, which have a patch each.
    return hf.changed({"out": whole(text, "hidden_size", 1024),
                       "temporal_patch_size": 1})  # fmt: skip


def config(hf: Mapping[str, Any]) -> VisionConfig:
    """Read the fields; raises :class:`CheckpointError` naming the field."""
    hidden, heads = hidden_and_heads(hf, "num_attention_heads", 4)
    refuse_unless(hf, "layer_norm_eps", EPS)
    rope = fields_of(hf, "rope_parameters")
    if number(rope, "rope_theta", THETA) != THETA:
        raise CheckpointError(
            "config field 'vision_config.rope_parameters': found "
            f"{dict(rope)!r:.80}, accepted: rope_theta of {THETA:g}"
        )
    size = whole(hf, "patch_size")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        out_size=whole(hf, "out"),
        layers=whole(hf, "num_hidden_layers"),
        heads=heads,
        patch=whole(hf, "num_channels") * size**2,
        merge=whole(hf, "spatial_merge_size") ** 2,
        side=whole(hf, "image_size") // size,
        tapped=(),
        has_corners=False,
        activation=one_of(hf, "hidden_act", mlp.ACTIVATIONS),
    )


def weights(c: VisionConfig) -> Weights:
    """Return the weight tree, by tensor names without a prefix."""
    h, wide = c.hidden_size, c.merge * c.hidden_size
    table = groups.linear("embeddings.position_embedding", c.side**2, h)
    patch = siglip_vision.PATCH.removesuffix(".weight")
    return Weights(
        groups.linear(patch, h, c.patch, bias=True),
        Group("embedding", **table.params),
        tuple(
            siglip_vision.layer_weights(c, f"encoder.layers.{index}.")
            for index in range(c.layers)
        ),
        layer_norm.norm("post_layernorm", h, bias=True),
        layer_norm.norm("projector.pre_norm", h, bias=True),
        groups.linear("projector.linear_1", wide, wide, bias=True),
        groups.linear("projector.linear_2", c.out_size, wide, bias=True),
    )


def pool(
    ops: Ops, c: VisionConfig, w: Weights, arrays: tuple[Array, ...],
    _batch: SequenceBatch,
) -> Array:  # fmt: skip
    """Return the features [T / merge, out] of squares of patches."""
    x = ops.layer_norm(arrays[0], w.norm, eps=EPS)
    x = ops.layer_norm(x, w.first_norm, eps=FIRST_EPS)
    x = x.reshape(x.shape[0] // c.merge, c.merge * c.hidden_size)
    return ops.linear(ops.activate(ops.linear(x, w.first), kind="gelu"), w.second)


def adapt(c: VisionConfig, checkpoint: Checkpoint) -> tuple[Any, AdaptedCheckpoint]:
    """Make the convolution of patches a matrix."""
    return c, changed(checkpoint, {siglip_vision.PATCH: flat_patches(c)})


LAYERS: Final = EncoderLayers(qwen3_vision.begin, qwen3_vision.layer)
MODEL = Encoder(
    config, weights, LAYERS.encode, pool, adapt, specs=qwen3_vision.specs,
    layers=LAYERS,
)  # fmt: skip
