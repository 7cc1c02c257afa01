"""Granite 3 (IBM, 2024): Llama with constant factors on four of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.models import blocks, llama
from inl.models.config import number
from inl.spec.cache import State
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


@dataclass(frozen=True, slots=True)
class GraniteConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    embed_scale: float = 1.0
    block_scale: float = 1.0
    """Factor on the output of every block."""
    logit_scale: float = 1.0


def config(hf: Mapping[str, Any]) -> GraniteConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    return llama.extended(
        GraniteConfig,
        llama.config(hf),
        **factors(hf),
    )


def factors(hf: Mapping[str, Any]) -> dict[str, float]:
    """Read the factors, by the fields of :class:`GraniteConfig`."""
    return {
        "attention_scale": number(hf, "attention_multiplier", 1.0),
        "embed_scale": number(hf, "embedding_multiplier", 1.0),
        "block_scale": number(hf, "residual_multiplier", 1.0),
        "logit_scale": 1 / number(hf, "logits_scaling", 1.0),
    }


def embed(ops: Ops, c: GraniteConfig, w: Any, step: Step) -> blocks.Carry:
    carry = blocks.embed(ops, c, w.embed, step)
    return carry._replace(residual=carry.residual * c.embed_scale)


def scaled_layer(
    feed_forward: Callable[[Ops, Any, Any, blocks.Carry], blocks.Carry], ops: Ops,
    c: Any, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Attention block, then ``feed_forward`` of ``w.mlp``, each with the factor."""
    carry, state = blocks.attention(
        ops, c, w.attention, carry, step, state, index=index, view=c.views[index],
        sampled_step=sampled_step,
    )  # fmt: skip
    carry = carry._replace(delta=carry.delta * c.block_scale)
    carry = feed_forward(ops, c, w.mlp, carry)
    return carry._replace(delta=carry.delta * c.block_scale), state


def head(ops: Ops, c: GraniteConfig, w: Any, carry: Any, step: Step) -> Array:
    return llama.head(ops, c, w, carry, step) * c.logit_scale


MODEL = replace(
    llama.MODEL,
    config=config,
    embed=embed,
    layer=partial(scaled_layer, blocks.gated_mlp),
    head=head,
)
