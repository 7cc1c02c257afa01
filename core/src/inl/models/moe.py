"""Base of decoders with mixture-of-experts feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import CheckpointError
from inl.models import blocks, llama
from inl.models.config import whole
from inl.ops.group_route import ExpertBias
from inl.ops.linear import Linear
from inl.ops.mlp import ACTIVATIONS as FUSED
from inl.ops.mlp import GatedMlp
from inl.ops.moe import Experts
from inl.ops.norm import Norm
from inl.spec.step import Array
from inl.spec.weights import FusedSlice, Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class Moe(NamedTuple):
    """Weights of :func:`mixture`: groups, replaced by tensors when loaded."""

    norm: Norm | Group | None
    """``None`` in blocks with another one, which call :func:`outputs`."""
    router: Linear | Group
    experts: Experts | Group
    shared: GatedMlp | Group | None = None
    """Expert that is added for every token."""
    shared_gate: Linear | Group | None = None
    """[1, H]: gate of the shared expert's output."""
    bias: ExpertBias | Group | None = None
    """[E]: added to the scores that rank experts, in models with a grouping."""


class Grouping(NamedTuple):
    """Attributes of :data:`~inl.ops.group_route.group_route`."""

    kind: str
    groups: int
    chosen: int
    best_of: int


@dataclass(frozen=True, slots=True)
class MoeConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint.

    ``intermediate_size`` applies to dense layers.
    """

    experts: int = 1
    experts_per_token: int = 1
    expert_size: int = 1
    """I: inner size of one expert."""
    renormalize: bool = True
    """Whether the routing weights of a token are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts."""
    shared_size: int = 0
    """Inner size of the shared expert; 0 is none."""
    grouping: Grouping | None = None
    """Groups of experts, if experts are chosen by groups."""
    routed_scale: float = 1.0
    """Factor on the routing weights."""


def with_experts(
    base: llama.LlamaConfig, hf: Mapping[str, Any], *, count: str, gated: bool = True,
    **given: Any,
) -> MoeConfig:  # fmt: skip
    """Extend a dense config; ``count`` names the field with the number of experts.

    gated: whether experts have gates.

    Raises :class:`CheckpointError` naming the field.
    """
    experts, chosen = whole(hf, count), whole(hf, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"config field 'num_experts_per_tok': found {chosen}, "
            f"expected at most {count}, {experts}"
        )
    if gated:
        refuse_open(base.activation)
    given |= {"experts": experts, "experts_per_token": chosen}
    return llama.extended(MoeConfig, base, **given)


def refuse_open(activation: str) -> None:
    """Raise :class:`CheckpointError` for an activation that no gated layer fuses."""
    if activation not in FUSED:
        raise CheckpointError(
            f"config field 'hidden_act': found {activation}, accepted in mixtures "
            f"of experts: {', '.join(FUSED)}"
        )


def mixture(ops: Ops, c: MoeConfig, w: Moe, carry: blocks.Carry) -> blocks.Carry:
    """Mixture-of-experts block, with a shared expert if the model has one."""
    assert w.norm is not None, "a block without one calls outputs"
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    return carry._replace(residual=residual, delta=outputs(ops, c, w, x))


def outputs(ops: Ops, c: MoeConfig, w: Moe, x: Array) -> Array:
    """Return this rank's sum of the experts of each token [T, H] and the shared one."""
    ids, weights = _routed(ops, c, w, ops.linear(x, w.router))
    delta = ops.experts(x, ids, weights, w.experts, activation=c.activation)
    if w.shared is None:
        return delta
    shared = ops.gated_mlp(x, w.shared, activation=c.activation)
    if w.shared_gate is not None:
        shared = ops.sigmoid_gate(shared, ops.linear(x, w.shared_gate))
    return delta + shared


def _routed(ops: Ops, c: MoeConfig, w: Moe, logits: Array) -> tuple[Array, Array]:
    given: dict[str, Any] = {"k": c.experts_per_token, "renormalize": c.renormalize}
    if c.grouping is None:
        ids, weights = ops.route(logits, kind="softmax_topk", **given)
    else:
        assert w.bias is not None, "a model with a grouping declares one"
        ids, weights = ops.group_route(logits, w.bias, **given, **c.grouping._asdict())
    return ids, weights if c.routed_scale == 1.0 else weights * c.routed_scale


def feed_forward(
    ops: Ops, c: MoeConfig, w: Moe | blocks.Mlp, carry: blocks.Carry
) -> blocks.Carry:
    """Feed-forward block of a layer with experts, or of a dense one."""
    if isinstance(w, Moe):
        return mixture(ops, c, w, carry)
    return blocks.gated_mlp(ops, c, w, carry)


layer = partial(blocks.layer, feed_forward)


def weights(
    c: MoeConfig, feed_forward: Callable[[MoeConfig, str, Group], Moe]
) -> llama.Weights:
    """Dense weight tree with ``feed_forward(c, at, norm)`` in MoE layers."""
    dense = llama.weights(c)
    layers = list(dense.layers)
    for index in set(range(c.layers)) - set(c.dense_layers):
        norm, at = layers[index].mlp.norm, f"model.layers.{index}."
        layers[index] = layers[index]._replace(mlp=feed_forward(c, at, norm))
    return dense._replace(layers=tuple(layers))


def router(c: MoeConfig, *sources: str) -> Group:
    """Return the router [E, H], stored under the first of ``sources`` that exists."""
    forms = [Param(name, (c.experts, c.hidden_size), finite=True) for name in sources]
    return Group("linear", weight=forms[0]._replace(aliases=tuple(forms[1:])))


def no_bias(c: MoeConfig, at: str) -> Group:
    """Return the parameters of routing by groups of a family without a bias."""
    name = f"{at}mlp.gate.e_score_correction_bias"
    bias = Param(name, (c.experts,), finite=True, wide=True, optional=True)
    return Group("group_route", bias=bias)


def expert_group(
    c: MoeConfig, stem: str, fused: str, *, gate: str, up: str, down: str
) -> Group:
    """Return the experts of a layer, in any of three checkpoint layouts.

    One tensor per expert (``stem.3.gate.weight``); gate and up of all experts in one
    tensor (``fused.gate_up_proj``, ``fused.down_proj``); or one tensor per matrix kind
    (``stem.gate.weight``), as read from GGUF files.
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
