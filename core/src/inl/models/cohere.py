"""Command R (Cohere, 2024): attention and feed-forward in parallel.

Both read one layer norm without bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.models import groups, layer_norm, llama, mlp
from inl.models.config import MAX_EPS, number, refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.views import refuse_windows
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Defaults of config fields that differ from Llama's."""
THETA: Final = 500000.0


@dataclass(frozen=True, slots=True)
class CohereConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    logit_scale: float = 1.0


def config(hf: Mapping[str, Any]) -> CohereConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_windows(hf)
    refuse_unless(hf, "use_qk_norm", False)
    return common(hf, THETA)


def common(hf: Mapping[str, Any], theta: float) -> CohereConfig:
    """Read what both have in common; theta: default base frequency."""
    refuse_unless(hf, "mlp_bias", False)
    eps = number(hf, "layer_norm_eps", 1e-5, most=MAX_EPS)
    base = llama.config(changed(hf, rms_norm_eps=eps), theta=theta)
    scale = number(hf, "logit_scale", 0.0625)
    return llama.extended(CohereConfig, base, logit_scale=scale)


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    tree = llama.weights(replace(c, layers=0))
    return tree._replace(
        layers=tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers)),
        norm=layer_norm.norm("model.norm", c.hidden_size, bias=False),
    )


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    attention = layer_norm.Attention(
        layer_norm.norm(f"{at}input_layernorm", c.hidden_size, bias=False),
        groups.qkv(c, at, bias=c.qkv_bias, interleaved=True),
        groups.out(c, at, bias=c.out_bias),
    )
    return llama.Layer(attention, layer_norm.Mlp(mlp.weights(c, f"{at}mlp")))


def head(ops: Ops, c: CohereConfig, w: Any, carry: Any, step: Step) -> Array:
    return layer_norm.head(ops, c, w, carry, step) * c.logit_scale


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer_norm.parallel_layer,
    head=head,
)  # fmt: skip
