"""HyperCLOVA X SEED (NAVER, 2025): Granite with norms after the blocks as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inl.models import granite, groups, llama, post_norm
from inl.models.config import flag, number
from inl.spec.cache import State
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


@dataclass(frozen=True, slots=True)
class HyperConfig(granite.GraniteConfig):
    """Sizes and constants of one checkpoint."""

    post: bool = True
    """Whether the output of every block is normalized."""


def config(hf: Mapping[str, Any]) -> HyperConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    base = llama.config(hf)
    factors: dict[str, Any] = granite.factors(hf)
    scale = number(hf, "attention_multiplier", base.head_dim**-0.5)
    factors |= {
        "attention_scale": scale,
        "logit_scale": number(hf, "logits_scaling", 1.0),
    }
    return llama.extended(
        HyperConfig, base, post=flag(hf, "use_post_norm", True), **factors
    )


def weights(c: HyperConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        first, second = (
            groups.norm(f"{at}post_norm{number}", c.hidden_size) if c.post else None
            for number in (1, 2)
        )
        old = layer.attention
        return llama.Layer(
            post_norm.Attention(old.qkv, old.out, first, old.norm),
            post_norm.Mlp(layer.mlp.mlp, second, layer.mlp.norm),
        )

    return llama.with_layers(llama.weights(c), changed)


def layer(
    ops: Ops, c: HyperConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = post_norm.attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    carry = carry._replace(delta=carry.delta * c.block_scale)
    carry = post_norm.gated_mlp(ops, c, w.mlp, carry)
    return carry._replace(delta=carry.delta * c.block_scale), state


def head(ops: Ops, c: HyperConfig, w: Any, carry: Any, step: Step) -> Array:
    return post_norm.gathered_head(ops, c, w, carry, step) * c.logit_scale


MODEL = replace(granite.MODEL, config=config, weights=weights, layer=layer, head=head)
