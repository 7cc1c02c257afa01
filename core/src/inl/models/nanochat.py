"""nanochat (Karpathy, 2025): norms without weights, squared ReLU, capped logits.

Queries and keys rotate the other way, which is the rotation of their swapped halves,
and are then normalized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import wrap
from inl.models import blocks, groups, hunyuan_v1_dense, llama, mlp
from inl.models.config import cap
from inl.models.fields import changed, with_defaults
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param, RowSlices

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {"hidden_act": "relu2", "final_logit_softcapping": 15.0}
"""Defaults of config fields that differ from Llama's."""
ENTER: Final = "model.embed_norm"
"""Name of the norm of embeddings, which no file has."""


@dataclass(frozen=True, slots=True)
class NanoConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    logit_cap: float | None = None


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Embedding | Group
    layers: tuple[llama.Layer, ...]
    norm: Norm | Group
    head: Linear | Group
    enter: Norm | Group
    """Applied to embeddings."""


def config(hf: Mapping[str, Any]) -> NanoConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = changed(with_defaults(hf, DEFAULTS), mlp_bias=False)
    limit = cap(hf, "final_logit_softcapping", None)
    return llama.extended(
        NanoConfig, replace(llama.config(hf), head_norm=True), logit_cap=limit
    )


def weights(c: NanoConfig) -> Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def swapped(param: Param, heads: int) -> Param:
        half = c.head_dim // 2
        order = [*range(half, c.head_dim), *range(half)]
        spans = groups.head_rows(order, c.head_dim, heads)
        return param._replace(row_slices=RowSlices(spans, heads * c.head_dim))

    def altered(at: str, layer: llama.Layer) -> llama.Layer:
        inner = mlp.ungated(c, f"{at}mlp.fc1", f"{at}mlp.fc2")
        params = dict(groups.qkv(c, at, bias=c.qkv_bias).params)
        for name, param in params.items():
            if name[0] in "qk":
                heads = c.heads if name[0] == "q" else c.kv_heads
                params[name] = swapped(param, heads)
        return llama.Layer(
            layer.attention._replace(qkv=Group("qkv_linear", **params)),
            layer.mlp._replace(mlp=inner),
        )

    tree = llama.with_layers(llama.weights(c), altered)
    return Weights(*tree, groups.norm(ENTER, c.hidden_size))


def embed(ops: Ops, c: NanoConfig, w: Weights, step: Step) -> blocks.Carry:
    carry = blocks.embed(ops, c, w.embed, step)
    residual = ops.rms_norm(carry.residual, w.enter, eps=c.norm_eps)
    return carry._replace(residual=residual)


def head(ops: Ops, c: NanoConfig, w: Any, carry: Any, step: Step) -> Array:
    logits = llama.head(ops, c, w, carry, step)
    return logits if c.logit_cap is None else ops.soft_cap(logits, cap=c.logit_cap)


def adapt(
    c: NanoConfig, checkpoint: Checkpoint
) -> tuple[NanoConfig, AdaptedCheckpoint]:
    """Add the weights of norms, which are ones."""
    names = checkpoint.names()
    sizes = {"model.norm": c.hidden_size, ENTER: c.hidden_size}
    for index in range(c.layers):
        at = f"model.layers.{index}."
        sizes |= {f"{at}{name}_layernorm": c.hidden_size
                  for name in ("input", "post_attention")}  # fmt: skip
        sizes |= {f"{at}self_attn.{name}_norm": c.head_dim for name in "qk"}
    pieces = {
        f"{name}.weight": Piece((names[0],), (size,), partial(_ones, size))
        for name, size in sizes.items()
        if f"{name}.weight" not in names
    }
    pieces |= {name: Piece((name,), checkpoint.spec(name)[1]) for name in names}
    return c, AdaptedCheckpoint(checkpoint, pieces)


def _ones(size: int, _stored: Any) -> Any:
    return wrap(np.ones(size, np.float32))


MODEL = replace(
    hunyuan_v1_dense.MODEL, config=config, weights=weights, embed=embed, head=head,
    adapt=adapt,
)  # fmt: skip
