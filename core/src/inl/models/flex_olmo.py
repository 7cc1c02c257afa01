"""FlexOlmo (Shi et al., 2025): OLMo 2 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.models import llama, moe, olmo2, post_norm, qwen3_moe
from inl.models.config import flag
from inl.models.fields import with_defaults
from inl.models.rope import read_rope
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.step import Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

THETA: Final = 5e5
DEFAULTS: Final = {
    "max_position_embeddings": 4096, "num_experts_per_tok": 5, "num_experts": 7,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


class Mixture(NamedTuple):
    """Weights of a block with experts: groups, replaced by tensors when loaded."""

    mixture: moe.Moe
    post: Norm | Group | None
    """Applied to the block's output."""
    norm: Norm | Group | None = None


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = olmo2.with_rope(hf, read_rope(hf, theta=THETA))
    return moe.with_experts(
        base, hf, count="num_experts", expert_size=base.intermediate_size,
        renormalize=flag(hf, "norm_topk_prob", False),
    )  # fmt: skip


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        post = layer.mlp.post
        inner = qwen3_moe.feed_forward(c, at, post)._replace(norm=None)
        return layer._replace(mlp=Mixture(inner, post))

    return llama.with_layers(olmo2.weights(c), changed)


def layer(
    ops: Ops, c: moe.MoeConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = post_norm.attention(
        ops, c, w.attention, carry, step, state,
        index=index, sampled_step=sampled_step, wide_norms=True,
    )  # fmt: skip
    return feed_forward(ops, c, w.mlp, carry), state


def feed_forward(ops: Ops, c: Any, w: Mixture, carry: Any) -> Any:
    """Block of experts whose output is normalized."""
    residual, x = post_norm.enter(ops, c, carry, w.norm)
    delta = moe.outputs(ops, c, w.mixture, x)
    delta = post_norm.leave(ops, c, delta, w.post)
    return carry._replace(residual=residual, delta=delta)


MODEL = replace(olmo2.MODEL, config=config, weights=weights, layer=layer)
