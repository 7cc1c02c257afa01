"""Decoders whose feed-forward layers are mixtures of experts: what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from inl.errors import CheckpointError
from inl.models import blocks, llama
from inl.models.config import whole
from inl.ops.linear import Linear
from inl.ops.mlp import GatedMlp
from inl.ops.moe import Experts
from inl.ops.norm import Norm
from inl.ops.protocol import Ops
from inl.spec.cache import State
from inl.spec.step import Step
from inl.spec.weights import FusedSlice, Group, Param


class Moe(NamedTuple):
    """Groups of :func:`mixture`, then their tensors."""

    norm: Norm | Group
    router: Linear | Group
    experts: Experts | Group
    shared: GatedMlp | Group | None = None
    """An expert that every token goes to besides."""
    shared_gate: Linear | Group | None = None
    """[1, H]: how much of the shared expert a token takes."""


@dataclass(frozen=True, slots=True)
class MoeConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint.

    ``intermediate_size`` is that of dense layers.
    """

    experts: int = 1
    experts_per_token: int = 1
    expert_size: int = 1
    """I of one expert."""
    renormalize: bool = True
    """Whether the weights of a token's experts sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a plain feed-forward."""
    shared_size: int = 0
    """I of the shared expert; 0 is none."""


def with_experts(
    base: llama.LlamaConfig, hf: Mapping[str, Any], *, count: str, **given: Any
) -> MoeConfig:
    """Add a mixture to a dense config; ``count`` names the field with the experts.

    Raises :class:`CheckpointError` naming the field.
    """
    experts, chosen = whole(hf, count), whole(hf, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"config field 'num_experts_per_tok': found {chosen}, "
            f"expected at most {count}, {experts}"
        )
    old = {field.name: getattr(base, field.name) for field in fields(base)}
    return MoeConfig(**old | given, experts=experts, experts_per_token=chosen)


def mixture(ops: Ops, c: MoeConfig, w: Moe, carry: blocks.Carry) -> blocks.Carry:
    """Feed-forward block: each token through its experts, and the shared one if any."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    ids, weights = ops.route(
        ops.linear(x, w.router),
        k=c.experts_per_token,
        kind="softmax_topk",
        renormalize=c.renormalize,
    )
    delta = ops.experts(x, ids, weights, w.experts, activation=c.activation)
    if w.shared is not None:
        shared = ops.gated_mlp(x, w.shared, activation=c.activation)
        if w.shared_gate is not None:
            shared = ops.sigmoid_gate(shared, ops.linear(x, w.shared_gate))
        delta = delta + shared
    return carry._replace(residual=residual, delta=delta)


def layer(
    ops: Ops, c: MoeConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    carry, state = blocks.attention(
        ops, c, w.attention, carry, step, state, index=index, view=c.views[index],
        sampled_step=sampled_step,
    )  # fmt: skip
    if isinstance(w.mlp, Moe):
        return mixture(ops, c, w.mlp, carry), state
    return blocks.gated_mlp(ops, c, w.mlp, carry), state


def weights(
    c: MoeConfig, feed_forward: Callable[[MoeConfig, str, Group], Moe]
) -> llama.Weights:
    """A dense decoder's, but ``feed_forward(c, at, norm)`` in sparse layers."""
    dense = llama.weights(c)
    layers = list(dense.layers)
    for index in set(range(c.layers)) - set(c.dense_layers):
        norm, at = layers[index].mlp.norm, f"model.layers.{index}."
        layers[index] = layers[index]._replace(mlp=feed_forward(c, at, norm))
    return dense._replace(layers=tuple(layers))


def router(c: MoeConfig, *sources: str) -> Group:
    """[E, H] under the first of the names that is there."""
    forms = [Param(name, (c.experts, c.hidden_size), finite=True) for name in sources]
    return Group("linear", weight=forms[0]._replace(aliases=tuple(forms[1:])))


def expert_group(
    c: MoeConfig, stem: str, fused: str, *, gate: str, up: str, down: str
) -> Group:
    """The experts of a layer as files have them.

    One tensor each (``stem.3.gate.weight``); gate and up of all in one
    (``fused.gate_up_proj``, ``fused.down_proj``); or all experts of a kind in one
    (``stem.gate.weight``), which is what GGUF files become.
    """
    wide = c.experts, c.expert_size, c.hidden_size

    def forms(name: str, fused: Param) -> Param:
        each = fused._replace(
            source=f"{stem}.{{}}.{name}.weight", stack=c.experts, fused_slice=None
        )
        every = each._replace(source=f"{stem}.{name}.weight", stack=0)
        return each._replace(aliases=(fused, every))

    halves = [
        Param(
            f"{fused}.gate_up_proj", wide, axis=1, fused_slice=FusedSlice(1, index, 2)
        )
        for index in range(2)
    ]
    narrow = Param(f"{fused}.down_proj", (wide[0], wide[2], wide[1]), axis=2)
    return Group(
        "experts",
        gate=forms(gate, halves[0]),
        up=forms(up, halves[1]),
        down=forms(down, narrow),
    )
