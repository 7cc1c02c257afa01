"""Phi 1, 1.5 and 2 (Microsoft, 2023): blocks in parallel that read one layer norm.

Half of the lanes rotate, all projections have biases, that to logits too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import groups, layer_norm, llama, mlp
from inl.models.config import MAX_EPS, number, refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed
from inl.models.rope import rope_fields

DEFAULTS: Final = {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5}
"""Defaults of config fields that differ from Llama's."""
RENAMES: Final = {
    r"\.self_attn\.dense\.": ".self_attn.o_proj.",
    r"^model\.final_layernorm\.": "model.norm.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "qk_layernorm", False)
    eps = number(hf, "layer_norm_eps", 1e-5, most=MAX_EPS)
    hf = changed(hf, rms_norm_eps=eps, attention_bias=True, mlp_bias=True)
    return llama.partly_rotated(hf, rope_fields(hf))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.fc1", f"{stem}.fc2")

    tree = layer_norm.weights(c, inner, shared=True)
    return tree._replace(head=groups.biased_head(c))


def adapt(
    c: llama.LlamaConfig, checkpoint: Checkpoint
) -> tuple[llama.LlamaConfig, AdaptedCheckpoint]:
    """Rename tensors."""
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer_norm.parallel_layer,
    head=layer_norm.head, adapt=adapt,
)  # fmt: skip
