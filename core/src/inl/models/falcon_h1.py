"""Falcon-H1 (TII, 2025): attention and Mamba-2 side by side in every layer.

Both read the same normalized input and add to the same residual. Constant factors are
on most of the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import blocks, granite, llama, mamba2, mlp
from inl.models.config import LEAST, MOST, flag, number, whole
from inl.models.fields import with_defaults
from inl.models.renames import renamed
from inl.models.views import FULL
from inl.ops.linear import Linear
from inl.ops.mlp import ACTIVATIONS as FUSED
from inl.ops.norm import Norm
from inl.spec.cache import Paged, Slotted, State
from inl.spec.step import Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
UNUSED: Final = (
    "num_logits_to_keep", "attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor"
)  # fmt: skip
"""Fields without an effect on the logits."""


@dataclass(frozen=True, slots=True)
class FalconConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    mamba: mamba2.Sizes | None = None
    factors: mamba2.Factors = mamba2.PLAIN
    normed: bool = False
    """Whether results of Mamba-2 are normalized."""
    norm_first: bool = True
    """Whether they are before they are gated."""
    mamba_bias: bool = False
    """Whether the output projection of Mamba-2 has a bias."""
    mamba_scale: float = 1.0
    """Factor on the results of Mamba-2."""
    input_scale: float = 1.0
    """Factor on the input of attention."""
    output_scale: float = 1.0
    """Factor on the results of attention."""
    gate_scale: float = 1.0
    """Factor on the gate of the feed-forward layer, before its activation."""
    down_scale: float = 1.0
    """Factor on the results of the feed-forward layer."""
    embed_scale: float = 1.0
    logit_scale: float = 1.0


class Layer(NamedTuple):
    """Parameters of one layer: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    mixer: mamba2.Mixer
    attention: blocks.Attention
    mlp_norm: Norm | Group
    up: Linear | Group
    down: Linear | Group
    gate: Linear | Group


def config(hf: Mapping[str, Any]) -> FalconConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name in UNUSED:
        hf.get(name)
    base = llama.config(hf)
    inner, expand = hf["mamba_d_ssm"], whole(hf, "mamba_expand", 2)
    if inner is None:
        inner = expand * base.hidden_size
    sizes = mamba2.read(hf, whole({"mamba_d_ssm": inner}, "mamba_d_ssm"))
    gate, down = _factors(hf, "mlp_multipliers", 2)
    whole_input = number(hf, "ssm_in_multiplier", 1.0)
    parts = (whole_input * each for each in _factors(hf, "ssm_multipliers", 5))
    return llama.extended(
        FalconConfig, base, mamba=sizes, factors=mamba2.Factors(*parts),
        attention_scale=number(hf, "key_multiplier", 1.0) * base.head_dim**-0.5,
        normed=flag(hf, "mamba_rms_norm", False),
        norm_first=flag(hf, "mamba_norm_before_gate", True),
        mamba_bias=flag(hf, "projectors_bias", False),
        mamba_scale=number(hf, "ssm_out_multiplier", 1.0),
        input_scale=number(hf, "attention_in_multiplier", 1.0),
        output_scale=number(hf, "attention_out_multiplier", 1.0),
        gate_scale=gate, down_scale=down,
        embed_scale=number(hf, "embedding_multiplier", 1.0),
        logit_scale=number(hf, "lm_head_multiplier", 1.0),
    )  # fmt: skip


def _factors(hf: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    value = hf.get(name)
    if value is None:
        return (1.0,) * count
    if (
        not isinstance(value, (list, tuple))
        or len(value) != count
        or any(type(one) not in (int, float) for one in value)
        or not all(LEAST <= one <= MOST for one in value)
    ):
        raise CheckpointError(
            f"config field {name!r}: found {show(value)}, expected {count} numbers "
            "above 0"
        )
    return tuple(map(float, value))


def weights(c: FalconConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    tree = llama.weights(c)
    layers: Any = tuple(
        _layer(c, f"model.layers.{index}.", plain)
        for index, plain in enumerate(tree.layers)
    )
    return tree._replace(layers=layers)


def _layer(c: FalconConfig, at: str, plain: llama.Layer) -> Layer:
    assert c.mamba is not None, "the config was read"
    up, down, gate = (
        mlp.open_linear(c, f"{at}mlp.{name}_proj", c.mlp_bias, name == "down")
        for name in ("up", "down", "gate")
    )
    mixer = mamba2.weights(
        c.mamba, f"{at}mamba", c.hidden_size, normed=c.normed, out_bias=c.mamba_bias,
        scaled=mamba2.is_scaled(c.factors),
    )  # fmt: skip
    own = plain.attention
    return Layer(own.norm, mixer, own, plain.mlp.norm, up, down, gate)


def state(c: FalconConfig) -> tuple[Paged | Slotted, ...]:
    """Return the cache of all layers, then their recurrent state."""
    assert c.mamba is not None, "the config was read"
    found: tuple[Paged | Slotted, ...] = llama.state(c)
    for index in range(c.layers):
        found += mamba2.state(c.mamba, index, c.dtype)
    return found


def layer(
    ops: Ops, c: FalconConfig, w: Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    assert c.mamba is not None, "the config was read"
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    mixed, state = mamba2.mix(
        ops, c.mamba, w.mixer, x, step, state, index, sampled_step, eps=c.norm_eps,
        factors=c.factors, norm_first=c.norm_first,
    )  # fmt: skip
    mixed = ops.linear(mixed, w.mixer.out) * c.mamba_scale
    parts = ops.qkv_linear(x * c.input_scale, w.attention.qkv)
    carry, state = blocks.attend_heads(
        ops, c, w.attention, carry._replace(residual=residual), parts, step, state,
        index=index, view=FULL, sampled_step=sampled_step,
    )  # fmt: skip
    carry = carry._replace(delta=carry.delta * c.output_scale + mixed)
    return feed_forward(ops, c, w, carry), state


def feed_forward(
    ops: Ops, c: FalconConfig, w: Layer, carry: blocks.Carry
) -> blocks.Carry:
    """Gated feed-forward block with factors on the gate and on the results."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.mlp_norm, eps=c.norm_eps
    )
    gate = ops.linear(x, w.gate) * c.gate_scale
    up = ops.linear(x, w.up)
    if c.activation in FUSED:
        inner = ops.gated_activation(gate, up, activation=c.activation)
    else:
        inner = ops.activate(gate, kind=c.activation) * up
    delta = ops.linear(inner, w.down) * c.down_scale
    return carry._replace(residual=residual, delta=delta)


def adapt(c: FalconConfig, checkpoint: Checkpoint) -> tuple[FalconConfig, Checkpoint]:
    """Rename tensors, and add constants that are weights here."""
    assert c.mamba is not None, "the config was read"
    found: Checkpoint = renamed(checkpoint, mamba2.RENAMES)
    return c, mamba2.with_constants(
        c.mamba, found, range(c.layers), normed=c.normed, factors=c.factors
    )


MODEL = replace(
    granite.MODEL, config=config, weights=weights, state=state, layer=layer, adapt=adapt
)
