"""complexity-deep 0.5 to 0.14: INL dynamics applied to the attention output.

Each layer passes a velocity and its equilibrium mu to the next; mu is added to the next
layer's queries, keys and values. With ``velocity="carry"`` each generated token starts
with the last layer's velocity of the previous token; prompt tokens start at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import CheckpointError
from inl.models import deep_blocks as blocks
from inl.models import groups
from inl.models.config import number, one_of, whole
from inl.models.deep_config import RoutedConfig, common
from inl.models.deep_names import adapt_deep
from inl.ops.embedding import Embedding
from inl.ops.inl import InlBlock
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.routed import TokenRoutedMlp
from inl.spec.cache import Paged, Slotted, State
from inl.spec.model import Model
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

VELOCITY = "velocity"
"""Name of the slotted state."""

VELOCITIES = ("reset", "carry")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepConfig(RoutedConfig):
    """Sizes and constants of one checkpoint."""

    dt: float
    controller: int
    """K: inner size of the controller."""
    mu_highway: float
    """Weight of the sum of all layers' mu in the mu passed to the next layer."""
    velocity: str
    """"reset": all velocities start at zero; "carry": a generated token begins
    with that of the previous token."""
    mu_context: bool = True
    """Whether mu depends on the position."""


class Layer(NamedTuple):
    """Parameters of one decoder layer."""

    attention: blocks.MuAttention
    dynamics: InlBlock | Group
    norm: Norm | Group
    mlp: TokenRoutedMlp | Group


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Embedding | Group
    layers: tuple[Layer, ...]
    norm: Norm | Group
    head: Linear | Group


class Carry(NamedTuple):
    """Activations passed from layer to layer, [T, H] each, and rotation tables."""

    residual: Array
    velocity: Array
    mu: Array
    """Added to the next layer's queries, keys and values, after projection."""
    total: Array
    """Sum of the mu of all layers so far."""
    rope: blocks.RopeTables


def config(hf: Mapping[str, Any]) -> DeepConfig:
    """Read a config; raises :class:`CheckpointError` naming the field."""
    return DeepConfig(
        **common(hf),
        dt=number(hf, "dynamics_dt", 0.1),
        controller=whole(hf, "dynamics_controller_hidden", 64),
        mu_highway=_highway(hf),
        velocity=one_of(hf, "velocity", dict(zip(VELOCITIES, VELOCITIES, strict=True))),
    )


def _highway(hf: Mapping[str, Any]) -> float:
    """Return the field, 0.1 if absent.

    Published checkpoints do not record whether they were trained with 0.1 or 0.
    """
    value = hf.get("mu_highway", 0.1)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):
        raise CheckpointError(
            f"config field 'mu_highway': found {value!r}, expected a number from 0"
        )
    return float(value)


def weights(c: DeepConfig) -> Weights:
    """Return the weight tree."""
    ends = blocks.ends(c)
    layers = tuple(_layer(c, index) for index in range(c.layers))
    return Weights(ends.embed, layers, ends.norm, ends.head)


def _layer(c: DeepConfig, index: int) -> Layer:
    at, h = f"model.layers.{index}.", c.hidden_size
    prefix = f"{at}dynamics."
    params = {
        "mu": Param(f"{prefix}mu", (h,)),
        "inner": Param(f"{prefix}controller_in.weight", (c.controller, 2 * h)),
        "inner_bias": Param(f"{prefix}controller_in.bias", (c.controller,)),
        "outer": Param(f"{prefix}controller_out.weight", (3 * h, c.controller)),
        "outer_bias": Param(f"{prefix}controller_out.bias", (3 * h,)),
    }
    if c.mu_context:
        params["context"] = Param(f"{prefix}mu_proj.weight", (h, h))
    return Layer(
        # No mu precedes the first layer.
        blocks.attention_groups(c, at, mu=c.mu_attention and index > 0),
        Group("inl_block", **params),
        groups.norm(f"{at}post_attention_layernorm", h),
        blocks.routed_group(c, at),
    )


def state(c: DeepConfig) -> tuple[Paged | Slotted, ...]:
    """Return the cache group, and the slotted velocity if it is carried."""
    layers = tuple(range(c.layers))
    paged = Paged(layers, c.kv_heads, c.head_dim, c.dtype, c.window)
    if c.velocity == "reset":
        return (paged,)
    return paged, Slotted(VELOCITY, (c.hidden_size,), c.dtype, "replay")


def embed(ops: Ops, c: DeepConfig, w: Weights, step: Step) -> Carry:
    residual, rope = blocks.begin(ops, c, w.embed, step)
    zeros = ops.zeros_like(residual)
    return Carry(residual, zeros, zeros, zeros, rope)


def layer(
    ops: Ops, c: DeepConfig, w: Layer, carry: Carry, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Carry, State]:  # fmt: skip
    if index == 0 and c.velocity == "carry":
        carry = carry._replace(velocity=ops.read_slots(state.slotted[VELOCITY], step))
    x = ops.rms_norm(carry.residual, w.attention.norm, eps=c.norm_eps)
    part, state = blocks.attend(
        ops, c, w.attention, x, carry.mu, carry.rope, step, state,
        index=index, sampled_step=sampled_step,
    )  # fmt: skip
    if sampled_step is not None:
        carry = carry._replace(
            residual=ops.take_rows(carry.residual, step.samples),
            velocity=ops.take_rows(carry.velocity, step.samples),
            total=ops.take_rows(carry.total, step.samples),
        )
        step = sampled_step
    # The dynamics are not linear: they need the sum over all ranks.
    attended = ops.all_reduce(part, axis="tensor")
    position, velocity, mu = ops.inl_block(
        attended, carry.velocity, w.dynamics, dt=c.dt
    )
    residual = carry.residual + position
    x = ops.rms_norm(residual, w.norm, eps=c.norm_eps)
    residual = residual + ops.token_routed_mlp(x, step.tokens, mu, w.mlp)
    total = carry.total + mu
    if index == c.layers - 1 and c.velocity == "carry":
        table = ops.write_slots(velocity, state.slotted[VELOCITY], step)
        state = state._replace(slotted={**state.slotted, VELOCITY: table})
    next_mu = mu + total * c.mu_highway
    return Carry(residual, velocity, next_mu, total, carry.rope), state


def head(ops: Ops, c: DeepConfig, w: Weights, carry: Carry, step: Step) -> Array:
    return blocks.head(ops, c, w.norm, w.head, carry.residual, step)


MODEL = Model(config, weights, state, embed, layer, head, adapt=adapt_deep)
