"""complexity-deep 0.5 to 0.14: INL dynamics act on what attention gives.

A velocity flows from layer to layer of a token, and mu, the equilibrium of one layer,
moves the queries, keys and values of the next. With ``velocity="carry"`` it flows from
token to token too, from the first generated token on: prompts begin at rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inl.errors import CheckpointError
from inl.models import deep_blocks as blocks
from inl.models import groups
from inl.models.config import number, one_of, whole
from inl.models.deep_config import RoutedConfig, common
from inl.models.deep_names import adapt_deep
from inl.ops.protocol import Ops
from inl.spec.cache import Paged, Slotted, State
from inl.spec.model import Model
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

VELOCITY = "velocity"
"""Name of the state that carries it."""

VELOCITIES = ("reset", "carry")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepConfig(RoutedConfig):
    """Sizes and constants of one checkpoint."""

    dt: float
    controller: int
    """K: width of the controller's inner layer."""
    mu_highway: float
    """Share of the sum of all earlier mu that the next layer gets besides the last."""
    velocity: str
    """"reset": each token begins at rest; "carry": generated ones go on."""
    mu_context: bool = True
    """Whether mu moves with the position."""


class Layer(NamedTuple):
    """Parameters of one decoder layer."""

    attention: Any
    dynamics: Any
    norm: Any
    mlp: Any


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any


class Carry(NamedTuple):
    """What flows from layer to layer: all [T, H] but the rotation."""

    residual: Array
    velocity: Array
    mu: Array
    """What moves the next layer's attention."""
    total: Array
    """Sum of the layers' own mu."""
    rope: blocks.RopeTables


def config(hf: Mapping[str, Any]) -> DeepConfig:
    """Read a config file; raises :class:`CheckpointError` naming the field."""
    return DeepConfig(
        **common(hf),
        dt=number(hf, "dynamics_dt", 0.1),
        controller=whole(hf, "dynamics_controller_hidden", 64),
        mu_highway=_highway(hf),
        velocity=one_of(hf, "velocity", dict(zip(VELOCITIES, VELOCITIES, strict=True))),
    )


def _highway(hf: Mapping[str, Any]) -> float:
    """Published checkpoints do not say whether they were trained with 0.1 or 0."""
    found = hf.get("mu_highway", 0.1)
    sound = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not sound or not 0 <= found < float("inf"):
        raise CheckpointError(
            f"config field 'mu_highway': found {found!r}, expected a number from 0"
        )
    return float(found)


def weights(c: DeepConfig) -> Weights:
    """What to load; no bytes are read."""
    ends = blocks.ends(c)
    layers = tuple(_layer(c, index) for index in range(c.layers))
    return Weights(ends.embed, layers, ends.norm, ends.head)


def _layer(c: DeepConfig, index: int) -> Layer:
    at, h = f"model.layers.{index}.", c.hidden_size
    near = f"{at}dynamics."
    params = {
        "mu": Param(f"{near}mu", (h,)),
        "inner": Param(f"{near}controller_in.weight", (c.controller, 2 * h)),
        "inner_bias": Param(f"{near}controller_in.bias", (c.controller,)),
        "outer": Param(f"{near}controller_out.weight", (3 * h, c.controller)),
        "outer_bias": Param(f"{near}controller_out.bias", (3 * h,)),
    }
    if c.mu_context:
        params["context"] = Param(f"{near}mu_proj.weight", (h, h))
    return Layer(
        # No layer comes before the first, so nothing moves its attention.
        blocks.attention_groups(c, at, mu=c.mu_attention and index > 0),
        Group("inl_block", **params),
        groups.norm(f"{at}post_attention_layernorm", h),
        blocks.routed_group(c, at),
    )


def state(c: DeepConfig) -> tuple[Paged | Slotted, ...]:
    """Keys and values, and the last token's velocity where that is carried."""
    layers = tuple(range(c.layers))
    paged = Paged(layers, c.kv_heads, c.head_dim, c.dtype, c.window)
    if c.velocity == "reset":
        return (paged,)
    return paged, Slotted(VELOCITY, (c.hidden_size,), c.dtype, "replay")


def embed(ops: Ops, c: DeepConfig, w: Weights, step: Step) -> Carry:
    residual, turn = blocks.begin(ops, c, w.embed, step)
    rest = ops.zeros_like(residual)
    return Carry(residual, rest, rest, rest, turn)


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
    whole = ops.all_reduce(part, axis="tensor")
    moved, velocity, mu = ops.inl_block(whole, carry.velocity, w.dynamics, dt=c.dt)
    residual = carry.residual + moved
    x = ops.rms_norm(residual, w.norm, eps=c.norm_eps)
    residual = residual + ops.token_routed_mlp(x, step.tokens, mu, w.mlp)
    total = carry.total + mu
    if index == c.layers - 1 and c.velocity == "carry":
        held = ops.write_slots(velocity, state.slotted[VELOCITY], step)
        state = state._replace(slotted={**state.slotted, VELOCITY: held})
    handed = mu + total * c.mu_highway
    return Carry(residual, velocity, handed, total, carry.rope), state


def head(ops: Ops, c: DeepConfig, w: Weights, carry: Carry, step: Step) -> Array:
    return blocks.head(ops, c, w.norm, w.head, carry.residual, step)


MODEL = Model(config, weights, state, embed, layer, head, adapt=adapt_deep)
