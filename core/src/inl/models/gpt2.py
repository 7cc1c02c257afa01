"""GPT-2 (Radford et al., 2019): layer norms, learned positions, no gate, biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, layer_norm, llama, mlp
from inl.models.config import (
    MAX_EPS,
    MIN_CONTEXT,
    flag,
    number,
    refuse_unless,
    whole,
)
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed, third, turned
from inl.models.rope import THETA, Rope
from inl.models.views import views
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm
from inl.ops.rope import RopeScaling
from inl.spec.step import Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

NAMES: Final = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
}  # fmt: skip
"""Fields of Llama's config, and GPT-2's names of them."""
DEFAULTS: Final = {
    "max_position_embeddings": 1024, "tie_word_embeddings": True, "n_inner": None,
    "activation_function": "gelu_new",
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
RENAMES: Final = {
    r"^(transformer\.)?h\.\d+\.attn\.(masked_)?bias$": "",
    r"^(transformer\.)?h\.": "model.layers.",
    r"^(transformer\.)?wte\.": "model.embed_tokens.",
    r"^(transformer\.)?wpe\.": "model.embed_positions.",
    r"^(transformer\.)?ln_f\.": "model.norm.",
    r"\.ln_1\.": ".input_layernorm.",
    r"\.ln_2\.": ".post_attention_layernorm.",
    r"\.attn\.c_proj\.": ".self_attn.o_proj.",
    r"\.attn\.c_attn\.": ".self_attn.c_attn.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Embedding | Group
    layers: tuple[llama.Layer, ...]
    norm: LayerNorm | Group
    head: Linear | Group
    positions: Embedding | Group


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, {})
    given = {name: hf[old] for name, old in NAMES.items() if old in hf}
    hf = with_defaults(changed(hf, **given), DEFAULTS)
    for name in ("reorder_and_upcast_attn", "n_ctx"):
        hf.get(name)  # no effect on the results
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        refuse_unless(hf, name, False)
    inner = hf["n_inner"]
    hf = changed(
        hf, attention_bias=True, mlp_bias=True, head_dim=None, num_key_value_heads=None,
        intermediate_size=4 * whole(hf, "hidden_size") if inner is None else inner,
        hidden_act=hf["activation_function"],
        rms_norm_eps=number(hf, "layer_norm_epsilon", 1e-5, most=MAX_EPS),
    )  # fmt: skip
    tokens = whole(hf, "max_position_embeddings", least=MIN_CONTEXT)
    base = llama.with_rope(hf, Rope(THETA, RopeScaling(), tokens))
    scale = None if flag(hf, "scale_attn_weights", True) else 1.0
    still = views((None,) * base.layers, (False,) * base.layers)
    return replace(base, views=still, attention_scale=scale)


def weights(c: llama.LlamaConfig) -> Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.c_fc", f"{stem}.c_proj")

    places = Param("model.embed_positions.weight", (c.max_tokens, c.hidden_size))
    tree = layer_norm.weights(c, inner)._asdict()
    return Weights(**tree, positions=Group("embedding", weight=places))


def embed(ops: Ops, c: llama.LlamaConfig, w: Weights, step: Step) -> blocks.Carry:
    carry = blocks.embed(ops, c, w.embed, step)
    places = ops.embedding(step.positions, w.positions)
    return carry._replace(residual=carry.residual + places)


def adapt(
    c: llama.LlamaConfig, checkpoint: Checkpoint
) -> tuple[llama.LlamaConfig, AdaptedCheckpoint]:
    """Rename tensors, transpose matrices and separate queries, keys and values."""
    return c, renamed(checkpoint, RENAMES, _split)


def _split(name: str, new: str, shape: tuple[int, ...]) -> dict[str, Piece] | None:
    stem, _, field = new.rpartition(".")
    if stem.endswith(".c_attn"):
        stem = stem.removesuffix("c_attn")
        return {
            f"{stem}{part}_proj.{field}": third(name, shape, index, transposed=True)
            for index, part in enumerate("qkv")
        }
    if field == "weight" and ("_proj" in stem or ".c_fc" in stem) and name != new:
        return {new: turned(name, shape)}
    return None


MODEL = replace(
    llama.MODEL, config=config, weights=weights, embed=embed, layer=layer_norm.layer,
    head=layer_norm.head, adapt=adapt,
)  # fmt: skip
