"""EAGLE-3 draft heads (Li et al., 2025) of Llama layers.

One decoder layer predicts a model's tokens from its hidden states. The entry of
position p is computed from the hidden state of token p and the embedding of token
p + 1, and predicts token p + 2. After the last known position the layer's own output
takes the place of the hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import CheckpointError
from inl.models import blocks, groups, llama, mlp
from inl.models.config import flag, whole
from inl.models.draft_module import DraftModule, Hidden, begin, join_columns
from inl.models.views import FULL
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.cache import Paged, State
from inl.spec.step import Array
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

TAP_FIELD = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleConfig(llama.LlamaConfig):
    """Sizes and constants of a draft head."""

    draft_vocab: int = 0
    """Tokens that the head predicts."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose inputs the head reads, ascending."""
    tapped: int = 0
    """Elements of the hidden states of all taps."""
    norm_before_residual: bool = False
    """Whether the residual is the normalized hidden state."""
    prefix: str = "midlayer."
    """Prefix of the layer's tensors."""
    own_head: bool = True
    """Whether the head has a projection to logits; else it shares the target's."""
    own_table: bool = False
    """Whether the head has embeddings; else it shares the target's."""

    def in_dtype(self, dtype: str) -> EagleConfig:
        """Return the config with another compute dtype."""
        return replace(self, dtype=dtype)


class Weights(NamedTuple):
    """Parameters of a draft head; those that it shares are ``None`` in its tree."""

    embed: Embedding | Group | None
    fc: Linear | Group
    """[H, tapped]."""
    hidden_norm: Norm | Group
    attention: blocks.Attention
    """``norm`` is that of the embeddings; queries, keys and values are projected from
    both."""
    mlp: blocks.Mlp
    norm: Norm | Group
    head: Linear | Group | None


def config(
    hf: Mapping[str, Any], names: list[str], *, layers: int, hidden: int
) -> EagleConfig:
    """Read a draft head's config; raises :class:`CheckpointError` naming the field.

    names: of the checkpoint's tensors. layers, hidden: of the target.
    """
    base = llama.config(hf)
    if base.layers != 1:
        raise CheckpointError(
            f"config field 'num_hidden_layers': found {base.layers}, accepted: 1, for "
            "a draft head"
        )
    taps = _taps(hf, layers)
    return llama.extended(
        EagleConfig, base,
        draft_vocab=whole(hf, "draft_vocab_size", base.vocab_size),
        taps=taps,
        tapped=len(taps) * hidden,
        norm_before_residual=flag(hf, "norm_before_residual", False),
        prefix="layers.0." if "layers.0.hidden_norm.weight" in names else "midlayer.",
        own_head="lm_head.weight" in names,
        own_table="embed_tokens.weight" in names,
    )  # fmt: skip


def _taps(hf: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers to tap: those of the config, else low, middle and high ones."""
    nested = hf.get("eagle_config")
    found = hf.get(TAP_FIELD)
    if found is None and isinstance(nested, Mapping):
        found = nested.get(TAP_FIELD)
    if found is None:
        found = [2, layers // 2, layers - 3]
    valid = isinstance(found, (list, tuple)) and all(
        type(each) is int and 0 <= each < layers for each in found
    )
    if not valid or not found or sorted(set(found)) != list(found):
        raise CheckpointError(
            f"config field {TAP_FIELD!r}: found {found!r:.80}, expected ascending "
            f"layers of the target, 0 to {layers - 1}; the default is 2, the middle "
            "and the third to last one"
        )
    return tuple(found)


def weights(c: EagleConfig) -> Weights:
    """Return the weight tree, by the tensor names of public checkpoints."""
    at, wide = c.prefix, replace(c, hidden_size=2 * c.hidden_size)
    table = Param("embed_tokens.weight", (c.vocab_size, c.hidden_size))
    head = groups.linear("lm_head", c.draft_vocab, c.hidden_size)
    return Weights(
        embed=Group("embedding", weight=table) if c.own_table else None,
        fc=groups.linear("fc", c.hidden_size, c.tapped),
        hidden_norm=groups.norm(f"{at}hidden_norm", c.hidden_size),
        attention=blocks.Attention(
            groups.norm(f"{at}input_layernorm", c.hidden_size),
            groups.qkv(wide, at, bias=c.qkv_bias),
            groups.out(c, at, bias=c.out_bias),
        ),
        mlp=blocks.Mlp(
            groups.norm(f"{at}post_attention_layernorm", c.hidden_size),
            mlp.weights(c, f"{at}mlp"),
        ),
        norm=groups.norm("norm", c.hidden_size),
        head=head if c.own_head else None,
    )


def state(c: EagleConfig) -> tuple[Paged, ...]:
    """Return the cache group of the layer."""
    return (Paged((0,), c.kv_heads, c.head_dim, c.dtype),)


def draft(
    ops: Ops, c: EagleConfig, w: Any, message: Array, hidden: Hidden, state: State,
    *, is_tapped: bool,
) -> tuple[Array, Array, State]:  # fmt: skip
    """Compute a step, see :class:`~inl.models.draft_module.DraftModule`."""
    step, state = begin(ops, message, state)
    given = ops.take_rows(hidden.source, hidden.rows)
    if is_tapped:
        given = ops.linear(given, w.fc)
    table = ops.embedding(step.tokens, w.embed)
    embedded = ops.rms_norm(table, w.attention.norm, eps=c.norm_eps)
    normed = ops.rms_norm(given, w.hidden_norm, eps=c.norm_eps)
    projected = ops.qkv_linear(join_columns(ops, embedded, normed), w.attention.qkv)
    residual = normed if c.norm_before_residual else given
    turns = blocks.rotation(ops, c.head_dim, step, c.rope_theta, c.rope_scaling)
    carry, state = blocks.attend_heads(
        ops, c, w.attention, blocks.Carry(residual, ops.zeros_like(residual), *turns),
        projected, step, state,
        index=0, view=FULL, sampled_step=None,
    )  # fmt: skip
    carry = blocks.gated_mlp(ops, c, w.mlp, carry)
    logits = blocks.head(ops, c, w.norm, w.head, carry, step)
    out = ops.take_rows(carry.residual + carry.delta, step.samples)
    tokens, tables = ops.sample(logits, step, state.tables, sampler="greedy")
    return tokens, out, state._replace(tables=tables)


def shared(c: EagleConfig) -> Mapping[str, str]:
    """Return the weight groups that a head shares with its target."""
    own = {"embed": c.own_table, "head": c.own_head}
    return {name: name for name, is_own in own.items() if not is_own}


MODULE = DraftModule(weights, state, draft, shared)
