"""OPT (Zhang et al., 2022): layer norms, learned positions from 2, ReLU, biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import gpt2, layer_norm, llama, mlp
from inl.models.config import MIN_CONTEXT, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed
from inl.models.rope import THETA, Rope
from inl.models.views import views
from inl.ops.rope import RopeScaling
from inl.spec.weights import Group, Param, RowSlices

DEFAULTS: Final = {
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "ffn_dim": 3072,
    "activation_function": "relu",
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
ACCEPTED: Final = {
    "do_layer_norm_before": True, "_remove_final_layer_norm": False,
    "enable_bias": True, "layer_norm_elementwise_affine": True,
}  # fmt: skip
"""Supported values of fields that change the layers."""
NORM_EPS: Final = 1e-5
SHIFT: Final = 2
"""Row of the table of positions that the first token reads."""
RENAMES: Final = {
    r"^(model\.)?decoder\.": "model.",
    r"^model\.final_layer_norm\.": "model.norm.",
    r"\.self_attn_layer_norm\.": ".input_layernorm.",
    r"(layers\.\d+)\.final_layer_norm\.": r"\1.post_attention_layernorm.",
    r"\.out_proj\.": ".o_proj.",
    r"(layers\.\d+)\.fc": r"\1.mlp.fc",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    hidden = whole(hf, "hidden_size")
    for name, accepted in (ACCEPTED | {"word_embed_proj_dim": hidden}).items():
        refuse_unless(hf, name, accepted)
    for name in ("dropout", "layerdrop", "init_std"):
        hf.get(name)  # no effect on the results
    return positioned(
        hf, intermediate_size=whole(hf, "ffn_dim"),
        hidden_act=hf["activation_function"], rms_norm_eps=NORM_EPS,
    )  # fmt: skip


def positioned(hf: Mapping[str, Any], **given: Any) -> llama.LlamaConfig:
    """Read a config of a model with biases and learned positions, without rotation.

    given: other values of fields. Raises :class:`CheckpointError` naming the field.
    """
    same = {"attention_bias": True, "mlp_bias": True, "head_dim": None}
    hf = changed(hf, **(same | {"num_key_value_heads": None} | given))
    tokens = whole(hf, "max_position_embeddings", least=MIN_CONTEXT)
    base = llama.with_rope(hf, Rope(THETA, RopeScaling(), tokens))
    still = views([view.window for view in base.views], (False,) * base.layers)
    return replace(base, views=still)


def weights(c: llama.LlamaConfig) -> gpt2.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.fc1", f"{stem}.fc2")

    total = c.max_tokens + SHIFT
    rows = RowSlices(((SHIFT, total),), total)
    places = Param(
        "model.embed_positions.weight", (c.max_tokens, c.hidden_size), row_slices=rows
    )
    tree = layer_norm.weights(c, inner)._asdict()
    return gpt2.Weights(**tree, positions=Group("embedding", weight=places))


def adapt(
    c: llama.LlamaConfig, checkpoint: Checkpoint
) -> tuple[llama.LlamaConfig, AdaptedCheckpoint]:
    """Rename tensors."""
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, embed=gpt2.embed,
    layer=layer_norm.layer, head=layer_norm.head, adapt=adapt,
)  # fmt: skip
