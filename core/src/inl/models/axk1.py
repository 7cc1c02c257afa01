"""A.X-K1 (SK Telecom, 2026): DeepSeek-V3 with a norm after the experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, deepseek, deepseek_v3, groups, llama, mla, moe
from inl.models.config import missing
from inl.models.fields import with_defaults
from inl.models.renames import renamed
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.step import Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "n_routed_experts": 192, "first_k_dense_replace": 1, "num_key_value_heads": 64,
    "max_position_embeddings": 32768,
}  # fmt: skip
"""Defaults of config fields that differ from those of DeepSeek-V3."""
POST: Final = "post_mlp_layernorm"


class Mixture(NamedTuple):
    """Weights of a block with experts: groups, replaced by tensors when loaded."""

    mixture: moe.Moe
    post: Norm | Group
    """Applied to the block's output."""


def config(hf: Mapping[str, Any]) -> mla.MlaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    found = deepseek.with_kinds(hf, deepseek_v3.config(hf))
    if not found.query_latent:
        raise missing("q_lora_rank", "an integer")
    return found


def weights(c: mla.MlaConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        if not isinstance(layer.mlp, moe.Moe):
            return layer
        assert isinstance(layer.mlp.bias, Group), "weights are not loaded yet"
        bias = layer.mlp.bias.params["bias"]._replace(optional=True)
        mixture = layer.mlp._replace(bias=Group("group_route", bias=bias))
        post = groups.norm(f"{at}mlp.{POST}", c.hidden_size)
        return layer._replace(mlp=Mixture(mixture, post))

    return llama.with_layers(deepseek.weights(c), changed)


def layer(
    ops: Ops, c: mla.MlaConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    carry, state = mla.attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    if not isinstance(w.mlp, Mixture):
        return blocks.gated_mlp(ops, c, w.mlp, carry), state
    carry = moe.mixture(ops, c, w.mlp.mixture, carry)
    # One rank has all of the output, as attention over latents accepts no more.
    delta = ops.rms_norm(carry.delta, w.mlp.post, eps=c.norm_eps)
    return carry._replace(delta=delta), state


def adapt(
    c: mla.MlaConfig, checkpoint: Checkpoint
) -> tuple[mla.MlaConfig, AdaptedCheckpoint]:
    """Rename norms after experts, and leave out those of dense layers, not used."""
    dense = "|".join(map(str, c.dense_layers)) or "none"
    patterns = {
        rf"^model\.layers\.({dense})\.(mlp\.)?{POST}\.weight$": "",
        rf"(\.\d+)\.{POST}\.": rf"\1.mlp.{POST}.",
    }
    c, checkpoint = deepseek.adapt(c, checkpoint)
    return c, renamed(checkpoint, patterns)


MODEL = replace(
    deepseek.MODEL, config=config, weights=weights, layer=layer, adapt=adapt
)
