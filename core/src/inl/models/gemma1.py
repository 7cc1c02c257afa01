"""Gemma (Gemma team, 2024): Llama with scaled embeddings and norms around one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inl.errors import CheckpointError
from inl.models import gemma, groups, llama
from inl.models.config import refuse_unless
from inl.models.fields import changed, with_defaults
from inl.spec.model import Model

DEFAULTS: Final = {
    "num_key_value_heads": 16, "head_dim": gemma.HEAD_DIM,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
ACTIVATIONS: Final = ("gelu", gemma.GELU)
"""Accepted values of ``hidden_act``: both mean the approximation by tanh."""


def config(hf: Mapping[str, Any]) -> gemma.GemmaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    refuse_unless(hf, "use_bidirectional_attention", False)
    for name in ("hidden_act", "hidden_activation"):
        if hf.get(name) not in (None, *ACTIVATIONS):
            raise CheckpointError(
                f"config field {name!r}: found {hf[name]!r:.80}, accepted: "
                f"{', '.join(ACTIVATIONS)}"
            )
    base = llama.config(changed(hf, hidden_act=gemma.GELU))
    return llama.extended(gemma.GemmaConfig, base, embed_scale=base.hidden_size**0.5)


def weights(c: gemma.GemmaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def norm(name: str) -> Any:
        return groups.norm(name, c.hidden_size, offset=c.norm_offset)

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        return llama.Layer(
            layer.attention._replace(norm=norm(f"{at}input_layernorm")),
            layer.mlp._replace(norm=norm(f"{at}post_attention_layernorm")),
        )

    tree = llama.with_layers(llama.weights(c), changed)
    return tree._replace(norm=norm("model.norm"))


MODEL = Model(config, weights, llama.state, gemma.embed, llama.layer, llama.head)
