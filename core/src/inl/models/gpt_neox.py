"""GPT-NeoX (Black et al., 2022) and Pythia: blocks in parallel, with a norm each.

A quarter of the lanes rotates, all projections but that to logits have biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, layer_norm, llama, mlp
from inl.models.config import MAX_EPS, flag, number
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed, third
from inl.models.rope import THETA, rope_fields
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {"hidden_act": "gelu"}
"""Defaults of config fields that differ from Llama's."""
QUARTER: Final = 0.25
"""Default share of the lanes that rotate."""
RENAMES: Final = {
    r"\.attention\.(masked_)?bias$|rotary_emb\.inv_freq$": "",
    r"^gpt_neox\.embed_in\.": "model.embed_tokens.",
    r"^gpt_neox\.final_layer_norm\.": "model.norm.",
    r"^gpt_neox\.": "model.",
    r"^embed_out\.": "lm_head.",
    r"\.attention\.dense\.": ".self_attn.o_proj.",
    r"\.attention\.query_key_value\.": ".self_attn.query_key_value.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


@dataclass(frozen=True, slots=True)
class NeoxConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    parallel: bool = True
    """Whether both blocks of a layer add to the same residual."""
    shared_norm: bool = False
    """Whether both blocks of a layer read one norm."""


def config(hf: Mapping[str, Any]) -> NeoxConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    share, theta = hf.get("rotary_pct", QUARTER), hf.get("rotary_emb_base", THETA)
    hf = changed(
        hf, rms_norm_eps=number(hf, "layer_norm_eps", 1e-5, most=MAX_EPS),
        attention_bias=flag(hf, "attention_bias", True), mlp_bias=True, head_dim=None,
        num_key_value_heads=None, partial_rotary_factor=share, rope_theta=theta,
    )  # fmt: skip
    base = llama.partly_rotated(hf, rope_fields(hf))
    parallel = flag(hf, "use_parallel_residual", True)
    return llama.extended(NeoxConfig, base, parallel=parallel)


def weights(c: NeoxConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    return layer_norm.weights(c, inner(c))


def inner(c: Any) -> Callable[[str], mlp.OpenMlp]:
    """Return what makes the feed-forward layer of a module."""

    def made(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.dense_h_to_4h", f"{stem}.dense_4h_to_h")

    return made


def layer(
    ops: Ops, c: NeoxConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    run = layer_norm.parallel_layer if c.parallel else layer_norm.layer
    return run(ops, c, w, carry, step, state, index=index, sampled_step=sampled_step)


def separated(
    checkpoint: Checkpoint, renames: Mapping[str, str], heads: int
) -> AdaptedCheckpoint:
    """Rename tensors, and separate queries, keys and values, which alternate."""

    def split(name: str, new: str, shape: tuple[int, ...]) -> dict[str, Piece] | None:
        stem, fused, field = new.partition("query_key_value")
        if not fused:
            return None
        return {
            f"{stem}{part}_proj{field}": third(name, shape, index, heads=heads)
            for index, part in enumerate("qkv")
        }

    return renamed(checkpoint, renames, split)


def adapt(
    c: NeoxConfig, checkpoint: Checkpoint
) -> tuple[NeoxConfig, AdaptedCheckpoint]:
    """Give tensors the names of :func:`weights`."""
    return c, separated(checkpoint, RENAMES, c.heads)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer, head=layer_norm.head,
    adapt=adapt,
)  # fmt: skip
