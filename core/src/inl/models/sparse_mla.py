"""Latent attention over the tokens that an indexer chooses (DeepSeek-AI, 2025).

A small indexer scores the cached tokens of each query: the scores of its heads, without
those below 0, are summed with weights of the query. Attention reads the best tokens
only. The indexer's keys are the keys of the layer's cache, whose values are latents. A
layer without an indexer attends to the tokens that the layer before it attended to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError, WeightMismatch
from inl.models import blocks, deepseek, deepseek_v3, groups, llama, mla, moe
from inl.models.config import refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

KEY_EPS: Final = 1e-6
"""Epsilon of the norm of index keys, whatever the config has."""


@dataclass(frozen=True, slots=True)
class SparseConfig(mla.MlaConfig):
    """Sizes and constants of one checkpoint."""

    index_tokens: int = 0
    """Most tokens that a query attends to."""
    index_heads: int = 0
    index_dim: int = 0
    """Lanes of an index key, of which the first ``rotary_dim`` rotate."""
    index_interleaved: bool = False
    """Whether the lanes of a rotating plane of the indexer are adjacent."""
    shared: tuple[bool, ...] = ()
    """Whether each layer attends to the tokens of the layer before it."""


class Indexer(NamedTuple):
    """Weights of :func:`choose`: groups, replaced by tensors when loaded."""

    queries: Linear | Group
    """[index_heads * index_dim, query_latent]."""
    key: Linear | Group
    """[index_dim, H]."""
    key_norm: LayerNorm | Group
    weights: Linear | Group
    """[index_heads, H]."""


class Attention(NamedTuple):
    """Weights of an attention block."""

    latent: mla.Attention
    indexer: Indexer | None
    """``None`` in a layer that attends to the tokens of the layer before it."""


class Carry(NamedTuple):
    """Activations passed from layer to layer."""

    residual: Array
    delta: Array
    cos: Array
    sin: Array
    ids: Any = ()
    """int32 [T, index_tokens] places that the next layer attends to, if it chooses none
    itself."""


def config(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> SparseConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field.

    defaults: the family's of fields that are absent.
    """
    hf = with_defaults(hf, defaults)
    refuse_unless(hf, "rope_interleave", True)
    for index, kind in enumerate(hf.get("layer_types") or ()):
        if kind != "indexed_attention":
            raise CheckpointError(
                f"config field 'layer_types[{index}]': found {show(kind)}, accepted: "
                "indexed_attention"
            )
    # The width of a head that rotates, whatever a config says.
    base = deepseek_v3.config(changed(hf, head_dim=whole(hf, "qk_rope_head_dim")))
    whole(hf, "q_lora_rank")
    size = whole(hf, "index_head_dim")
    if not base.rotary_dim <= size <= base.head_dim:
        raise CheckpointError(
            f"config field 'index_head_dim': found {size}, accepted: "
            f"{base.rotary_dim} to {base.head_dim}, the lanes of a key that rotate and "
            "of the cache"
        )
    return llama.extended(
        SparseConfig,
        deepseek.with_kinds(hf, base),
        index_tokens=whole(hf, "index_topk"),
        index_heads=whole(hf, "index_n_heads"),
        index_dim=size,
        shared=(False,) * base.layers,
    )


def weights(c: SparseConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    tree = deepseek.weights(c)
    layers = tuple(
        layer._replace(attention=Attention(layer.attention, _indexer(c, index)))
        for index, layer in enumerate(tree.layers)
    )
    return tree._replace(layers=layers)


def _indexer(c: SparseConfig, index: int) -> Indexer | None:
    if c.shared[index]:
        return None
    own, h = f"model.layers.{index}.self_attn.indexer.", c.hidden_size
    lanes = [*range(c.index_dim)]
    if c.index_interleaved:
        turned = c.rotary_dim
        lanes[:turned] = [*range(0, turned, 2), *range(1, turned, 2)]

    def ordered(name: str, heads: int, *width: int) -> Param:
        spans = groups.head_rows(lanes, c.index_dim, heads)
        found = groups.rows(f"{own}{name}", spans, heads * c.index_dim, *width)
        return found._replace(axis=None)

    norm = {name: ordered(f"k_norm.{name}", 1) for name in ("weight", "bias")}
    return Indexer(
        Group("linear", weight=ordered("wq_b.weight", c.index_heads, c.query_latent)),
        Group("linear", weight=ordered("wk.weight", 1, h)),
        Group("layer_norm", **norm),
        groups.linear(f"{own}weights_proj", c.index_heads, h),
    )


def embed(
    ops: Ops, c: SparseConfig, w: llama.Weights, step: Step
) -> blocks.Carry | Carry:
    carry = deepseek.embed(ops, c, w, step)
    return Carry(*carry) if any(c.shared) else carry


def layer(
    ops: Ops, c: SparseConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return moe.feed_forward(ops, c, w.mlp, carry), state


def attention(
    ops: Ops, c: SparseConfig, w: Attention, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None,
) -> tuple[Any, State]:  # fmt: skip
    """Attention block; ``carry`` has the rotation tables of ``rotary_dim`` lanes."""
    given = mla.project(ops, c, w.latent, carry)
    group, q, ids = c.views[index].group, given.q, getattr(carry, "ids", ())
    queries = factors = None
    key = given.latent
    if w.indexer is not None:
        queries, factors, key = _indexed(ops, c, w.indexer, carry, given)
    cache = ops.write_kv(key, given.latent, state.caches[index], step.writes[group])
    asked = step
    if sampled_step is not None:
        q, asked = ops.take_rows(q, step.samples), sampled_step
        if queries is not None:
            queries = ops.take_rows(queries, step.samples)
            factors = ops.take_rows(factors, step.samples)
    if queries is not None:
        ids = ops.index_topk(
            queries, factors, cache, asked, k=c.index_tokens, group=group
        )
    elif not hasattr(ids, "shape"):
        raise WeightMismatch(
            f"layer {index}: attends to the tokens of the layer before it, which "
            "another pipeline stage computes; accepted: stages that begin with a layer "
            "that has an indexer"
        )
    elif sampled_step is not None:
        ids = ops.take_rows(ids, step.samples)
    out = ops.sparse_attention(
        q, ids, cache, asked, scale=c.attention_scale or 1.0, group=group
    )
    caches = (*state.caches[:index], cache, *state.caches[index + 1 :])
    carry = mla.finish(ops, c, w.latent, carry, given.residual, out, step, sampled_step)
    if any(c.shared):
        following = c.shared[index + 1 : index + 2] == (True,)
        carry = carry._replace(ids=ids if following else ())
    return carry, state._replace(caches=caches)


def _indexed(
    ops: Ops, c: SparseConfig, w: Indexer, carry: Any, given: mla.Projected
) -> tuple[Array, Array, Array]:
    """Return the indexer's queries, the weights of its heads and its padded keys."""
    tokens, turned = given.x.shape[0], c.rotary_dim
    queries = ops.linear(given.y, w.queries).reshape(tokens, -1, c.index_dim)
    key = ops.layer_norm(ops.linear(given.x, w.key), w.key_norm, eps=KEY_EPS)
    key = key.reshape(tokens, 1, c.index_dim)
    q_turned, k_turned = ops.rope(
        queries[:, :, :turned], key[:, :, :turned], carry.cos, carry.sin
    )
    if c.index_dim > turned:
        q_turned = ops.join_lanes(q_turned, queries[:, :, turned:])
        k_turned = ops.join_lanes(k_turned, key[:, :, turned:])
    if c.head_dim > c.index_dim:
        padding = ops.zeros_like(given.latent[:, :, c.index_dim :])
        k_turned = ops.join_lanes(k_turned, padding)
    return q_turned, ops.linear(given.x, w.weights), k_turned


def head(ops: Ops, c: SparseConfig, w: llama.Weights, carry: Any, step: Step) -> Array:
    return blocks.head(ops, c, w.norm, w.head, carry, step)


MODEL = replace(deepseek_v3.MODEL, weights=weights, embed=embed, layer=layer, head=head)
"""Base of the families, whose configs differ."""
