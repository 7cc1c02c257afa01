"""complexity-deep 0.4.0 (2026): mu guidance between layers, without dynamics.

The feed-forward layer sums a token-routed expert and an expert shared by all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import CheckpointError
from inl.models import deep_blocks as blocks
from inl.models import groups
from inl.models.config import flag
from inl.models.deep_config import RoutedConfig, common
from inl.models.deep_names import adapt_guided
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.mlp import GatedMlp
from inl.ops.mu import MuGuidance, MuStart
from inl.ops.norm import Norm
from inl.ops.routed import TokenRoutedMlp
from inl.spec.cache import Paged, State
from inl.spec.model import Model
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedConfig(RoutedConfig):
    """Sizes and constants of one checkpoint."""

    shared: bool
    """Whether there is an expert shared by all tokens."""


class Layer(NamedTuple):
    """Parameters of one decoder layer."""

    attention: blocks.MuAttention
    norm: Norm | Group
    mlp: TokenRoutedMlp | Group
    shared: GatedMlp | Group | None
    guidance: MuGuidance | Group


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Embedding | Group
    start: MuStart | Group
    layers: tuple[Layer, ...]
    norm: Norm | Group
    head: Linear | Group


class Carry(NamedTuple):
    """Activations passed from layer to layer."""

    residual: Array
    """[T, H]."""
    mu: Array
    """[T, H]."""
    rope: blocks.RopeTables


def config(hf: Mapping[str, Any]) -> GuidedConfig:
    """Read a config; raises :class:`CheckpointError` naming the field."""
    if not flag(hf, "use_mu_guidance", True):
        raise CheckpointError(
            "config field 'use_mu_guidance': found false, accepted: true"
        )
    return GuidedConfig(**common(hf), shared=flag(hf, "shared_expert", True))


def weights(c: GuidedConfig) -> Weights:
    """Return the weight tree."""
    ends = blocks.ends(c)
    start = Group("mu_start", mu=Param("model.mu_init", (1, 1, c.hidden_size)))
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return Weights(ends.embed, start, layers, ends.norm, ends.head)


def _layer(c: GuidedConfig, at: str) -> Layer:
    h, inner = c.hidden_size, c.expert_size
    shared = Group(
        "gated_mlp",
        gate=Param(f"{at}mlp.shared_gate.weight", (inner, h)),
        up=Param(f"{at}mlp.shared_up.weight", (inner, h)),
        down=Param(f"{at}mlp.shared_down.weight", (h, inner)),
    )
    guidance = Group(
        "mu_guidance",
        mu=Param(f"{at}mu_guidance.mu", (h,)),
        context=Param(f"{at}mu_guidance.mu_proj.weight", (h, h)),
    )
    return Layer(
        blocks.attention_groups(c, at, mu=c.mu_attention),
        groups.norm(f"{at}post_attention_layernorm", h),
        blocks.routed_group(c, at),
        shared if c.shared else None,
        guidance,
    )


def state(c: GuidedConfig) -> tuple[Paged, ...]:
    """Return the cache group."""
    layers = tuple(range(c.layers))
    return (Paged(layers, c.kv_heads, c.head_dim, c.dtype, c.window),)


def embed(ops: Ops, c: GuidedConfig, w: Weights, step: Step) -> Carry:
    residual, rope = blocks.begin(ops, c, w.embed, step)
    return Carry(residual, ops.mu_start(residual, w.start), rope)


def layer(
    ops: Ops, c: GuidedConfig, w: Layer, carry: Carry, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Carry, State]:  # fmt: skip
    x = ops.rms_norm(carry.residual, w.attention.norm, eps=c.norm_eps)
    part, state = blocks.attend(
        ops, c, w.attention, x, carry.mu, carry.rope, step, state,
        index=index, sampled_step=sampled_step,
    )  # fmt: skip
    if sampled_step is not None:
        residual, mu = (
            ops.take_rows(x, step.samples) for x in (carry.residual, carry.mu)
        )
        carry, step = carry._replace(residual=residual, mu=mu), sampled_step
    residual, x = ops.reduce_add_norm(carry.residual, part, w.norm, eps=c.norm_eps)
    residual = residual + ops.token_routed_mlp(x, step.tokens, carry.mu, w.mlp)
    if w.shared is not None:
        residual = residual + ops.gated_mlp(x, w.shared, activation="silu")
    mu = ops.mu_guidance(residual, w.guidance)
    return Carry(residual, mu, carry.rope), state


def head(ops: Ops, c: GuidedConfig, w: Weights, carry: Carry, step: Step) -> Array:
    return blocks.head(ops, c, w.norm, w.head, carry.residual, step)


MODEL = Model(config, weights, state, embed, layer, head, adapt=adapt_guided)
