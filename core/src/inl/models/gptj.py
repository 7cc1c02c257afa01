"""GPT-J (Wang and Komatsuzaki, 2021) and CodeGen: blocks in parallel, one norm.

The first lanes of a head rotate in adjacent pairs; the feed-forward layer and the
projection to logits have biases, attention has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.errors import CheckpointError
from inl.models import gpt2, groups, layer_norm, llama, mlp
from inl.models.config import MAX_EPS, MIN_CONTEXT, number, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed, third
from inl.models.rope import THETA, Rope
from inl.ops.rope import RopeScaling

DEFAULTS: Final = {
    "max_position_embeddings": 2048, "n_inner": None, "activation_function": "gelu_new",
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
LANES: Final = 64
"""Default of the lanes that rotate."""
SHARDS: Final = 4
"""Triples of row ranges, of queries, values and keys, in matrices of CodeGen."""
RENAMES: Final = {
    r"\.attn\.(masked_bias|bias|causal_mask|embed_positions)$": "",
    r"^(transformer\.)?h\.": "model.layers.",
    r"^(transformer\.)?wte\.": "model.embed_tokens.",
    r"^(transformer\.)?ln_f\.": "model.norm.",
    r"\.ln_1\.": ".input_layernorm.",
    r"\.attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.attn\.": ".self_attn.",
    r"^(model\.layers.*(attn|masked_bias|causal_mask|embed_positions))$": "",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, {})
    given = {name: hf[old] for name, old in gpt2.NAMES.items() if old in hf}
    hf = with_defaults(changed(hf, **given), DEFAULTS)
    for name in ("n_ctx", "rotary", "scale_attn_weights"):
        hf.get(name)  # no effect on the results
    inner = hf["n_inner"]
    hf = changed(
        hf, mlp_bias=True, attention_bias=False, head_dim=None,
        num_key_value_heads=None, hidden_act=hf["activation_function"],
        intermediate_size=4 * whole(hf, "hidden_size") if inner is None else inner,
        rms_norm_eps=number(hf, "layer_norm_epsilon", 1e-5, most=MAX_EPS),
    )  # fmt: skip
    tokens = whole(hf, "max_position_embeddings", least=MIN_CONTEXT)
    base = llama.with_rope(hf, Rope(THETA, RopeScaling(), tokens))
    lanes = whole(hf, "rotary_dim", LANES)
    if lanes % 2 or lanes > base.head_dim:
        raise CheckpointError(
            f"config field 'rotary_dim': found {lanes}, accepted: even, at most "
            f"{base.head_dim}"
        )
    return replace(base, rope_scaling=base.rope_scaling._replace(rotary_dim=lanes))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.fc_in", f"{stem}.fc_out")

    def paired(at: str, layer: llama.Layer) -> llama.Layer:
        qkv = groups.qkv(c, at, interleaved=True)
        return layer._replace(attention=layer.attention._replace(qkv=qkv))

    tree = layer_norm.weights(c, inner, shared=True)
    return llama.with_layers(tree._replace(head=groups.biased_head(c)), paired)


def adapt(
    c: llama.LlamaConfig, checkpoint: Checkpoint
) -> tuple[llama.LlamaConfig, AdaptedCheckpoint]:
    """Rename tensors, and separate those of queries, keys and values."""
    return c, renamed(checkpoint, RENAMES, _split)


def _split(name: str, new: str, shape: tuple[int, ...]) -> dict[str, Piece] | None:
    stem, fused, field = new.partition("qkv_proj")
    if not fused:
        return None
    return {
        f"{stem}{part}_proj{field}": third(name, shape, index, heads=SHARDS)
        for index, part in enumerate("qvk")
    }


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer_norm.parallel_layer,
    head=layer_norm.head, adapt=adapt,
)  # fmt: skip
