"""StarCoder2 (BigCode, 2024): layer norms, biases, feed-forward without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inl.models import blocks, groups, layer_norm, llama, mlp
from inl.models.config import MAX_EPS, flag, number, refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.views import one_window, views
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": None,
    "tie_word_embeddings": True,
}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name in ("layer_types", "mlp_type"):
        refuse_unless(hf, name, {"layer_types": None, "mlp_type": "default"}[name])
    bias = flag(hf, "use_bias", True)
    eps = number(hf, "norm_epsilon", 1e-5, most=MAX_EPS)
    hf = changed(hf, attention_bias=bias, mlp_bias=bias, rms_norm_eps=eps)
    base = llama.config(hf)
    return replace(base, views=views(one_window(hf, base.layers, base.max_tokens)))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    tree = llama.weights(replace(c, layers=0))
    return tree._replace(
        layers=tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers)),
        norm=layer_norm.norm("model.norm", c.hidden_size, bias=True),
    )


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    def norm(name: str) -> Any:
        return layer_norm.norm(f"{at}{name}_layernorm", c.hidden_size, bias=True)

    attention = layer_norm.Attention(
        norm("input"),
        groups.qkv(c, at, bias=c.qkv_bias),
        groups.out(c, at, bias=c.out_bias),
    )
    inner = mlp.OpenMlp(
        mlp.open_linear(c, f"{at}mlp.c_fc", c.mlp_bias),
        mlp.open_linear(c, f"{at}mlp.c_proj", c.mlp_bias, down=True),
    )
    return llama.Layer(attention, layer_norm.Mlp(inner, norm("post_attention")))


def layer(
    ops: Ops, c: llama.LlamaConfig, w: llama.Layer, carry: Any, step: Step,
    state: State, *, index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    _, carry, state = layer_norm.attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    residual, x = layer_norm.enter(ops, c, carry, w.mlp.norm)
    delta = mlp.feed_forward(ops, x, w.mlp.mlp, c.activation)
    return carry._replace(residual=residual, delta=delta), state


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer, head=layer_norm.head
)
