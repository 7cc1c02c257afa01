"""OLMo 1 (Groeneveld et al., 2024): Llama with layer norms that have no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import wrap
from inl.models import blocks, layer_norm, llama, mlp
from inl.models.config import cap
from inl.models.fields import changed
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

EPS: Final = 1e-5
"""Of all norms."""


@dataclass(frozen=True, slots=True)
class OlmoConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    limit: float | None = None
    """Largest magnitude of queries, keys and values."""


def config(hf: Mapping[str, Any]) -> OlmoConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    base = llama.config(changed(hf, rms_norm_eps=EPS, mlp_bias=False))
    return llama.extended(OlmoConfig, base, limit=cap(hf, "clip_qkv", None))


def weights(c: OlmoConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    return layer_norm.weights(c, partial(mlp.weights, c), bias=False)


def layer(
    ops: Ops, c: OlmoConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    residual, x = layer_norm.enter(ops, c, carry, w.attention.norm)
    parts = ops.qkv_linear(x, w.attention.qkv)
    if c.limit is not None:
        parts = tuple(ops.clip(part, low=-c.limit, high=c.limit) for part in parts)
    carry, state = blocks.attend_heads(
        ops, c, w.attention, carry._replace(residual=residual), parts, step, state,
        index=index, view=c.views[index], sampled_step=sampled_step,
    )  # fmt: skip
    return layer_norm.feed_forward_block(ops, c, w.mlp, carry), state


def adapt(
    c: OlmoConfig, checkpoint: Checkpoint
) -> tuple[OlmoConfig, AdaptedCheckpoint]:
    """Add the weights of norms, which are ones."""
    names = checkpoint.names()
    norms = ["model.norm"]
    for index in range(c.layers):
        at = f"model.layers.{index}."
        norms += [f"{at}input_layernorm", f"{at}post_attention_layernorm"]
    ones = wrap(np.ones(c.hidden_size, np.float32))
    pieces = {
        f"{name}.weight": Piece((names[0],), ones.shape, lambda _stored: ones)
        for name in norms
        if f"{name}.weight" not in names
    }
    pieces |= {name: Piece((name,), checkpoint.spec(name)[1]) for name in names}
    return c, AdaptedCheckpoint(checkpoint, pieces)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer, head=layer_norm.head,
    adapt=adapt,
)  # fmt: skip
