"""MiniCPM3 (OpenBMB, 2024): latent attention, constant factors on three values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.models import blocks, deepseek, llama, mla
from inl.models.config import number, whole
from inl.models.fields import changed, with_defaults
from inl.spec.cache import State
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "num_key_value_heads": 40, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


@dataclass(frozen=True, slots=True)
class MiniCpmConfig(mla.MlaConfig):
    """Sizes and constants of one checkpoint."""

    embed_scale: float = 1.0
    block_scale: float = 1.0
    """Factor on the output of every block."""
    logit_scale: float = 1.0


def config(hf: Mapping[str, Any]) -> MiniCpmConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    if hf.get("v_head_dim") is None:
        size = whole(hf, "hidden_size") // whole(hf, "num_attention_heads")
        hf = changed(hf, v_head_dim=size)
    base = deepseek.rotated(hf)
    found = deepseek.with_latents(
        hf, base, dense_layers=tuple(range(base.layers)), interleaved=False
    )
    depth, size = base.layers**0.5, base.hidden_size
    return llama.extended(
        MiniCpmConfig, found,
        embed_scale=number(hf, "scale_emb", 1.0),
        block_scale=number(hf, "scale_depth", depth) / depth,
        logit_scale=number(hf, "dim_model_base", size) / size,
    )  # fmt: skip


def embed(ops: Ops, c: MiniCpmConfig, w: llama.Weights, step: Step) -> blocks.Carry:
    carry = deepseek.embed(ops, c, w, step)
    return carry._replace(residual=carry.residual * c.embed_scale)


def layer(
    ops: Ops, c: MiniCpmConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    carry, state = mla.attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    carry = carry._replace(delta=carry.delta * c.block_scale)
    carry = blocks.gated_mlp(ops, c, w.mlp, carry)
    return carry._replace(delta=carry.delta * c.block_scale), state


def head(ops: Ops, c: MiniCpmConfig, w: Any, carry: Any, step: Step) -> Array:
    return llama.head(ops, c, w, carry, step) * c.logit_scale


MODEL = replace(
    deepseek.MODEL, config=config, embed=embed, layer=layer, head=head,
)  # fmt: skip
