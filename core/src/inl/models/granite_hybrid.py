"""Granite 4 (IBM, 2025): Granite's blocks with Mamba-2 in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, granite, granite_moe, hybrid, llama, mamba2, moe
from inl.models.config import whole
from inl.models.fields import changed, with_defaults
from inl.models.views import View
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {"shared_intermediate_size": 1024, "layer_types": None}
"""Defaults of config fields that differ from those of Granite 3 mixtures."""
KINDS: Final = {
    "linear_attention": True, "full_attention": False, "mamba": True, "attention": False
}  # fmt: skip
"""Accepted entries of ``layer_types``, and whether the layer is recurrent."""


@dataclass(frozen=True, slots=True)
class HybridConfig(granite_moe.GraniteMoeConfig):
    """Sizes and constants of one checkpoint."""

    recurrent: tuple[bool, ...] = ()
    """Whether each layer is recurrent."""
    mamba: mamba2.Sizes | None = None
    rotated: bool = False
    """Whether queries and keys are rotated by their positions."""


def config(hf: Mapping[str, Any]) -> HybridConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, {**granite_moe.DEFAULTS, **DEFAULTS})
    for name in ("init_method", "normalization_function"):
        hf.get(name)  # of published configs, without an effect
    if hf["layer_types"] is None and "layers_block_type" in hf:
        hf = changed(hf, layer_types=hf["layers_block_type"])
    base = llama.config(hf)
    shared = whole(hf, "shared_intermediate_size")
    if hf["num_local_experts"] == 0:
        moe.refuse_open(base.activation)
        dense = tuple(range(base.layers))
        sparse: moe.MoeConfig = llama.extended(
            moe.MoeConfig, base, dense_layers=dense, shared_size=shared
        )
    else:
        sparse = moe.with_experts(
            base, hf, count="num_local_experts", expert_size=base.intermediate_size,
            shared_size=shared,
        )  # fmt: skip
    inner = whole(hf, "mamba_expand", 2) * base.hidden_size
    return llama.extended(
        HybridConfig, sparse, **granite.factors(hf),
        recurrent=hybrid.recurrent_layers(hf["layer_types"], base.layers, KINDS),
        mamba=mamba2.read(hf, inner),
        rotated=hf.get("position_embedding_type") == "rope",
    )  # fmt: skip


def weights(c: HybridConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    tree = llama.weights(c)
    layers = tuple(_layer(c, index, each) for index, each in enumerate(tree.layers))
    return tree._replace(layers=layers)


def _layer(c: HybridConfig, index: int, plain: llama.Layer) -> llama.Layer:
    at, norm = f"model.layers.{index}.", plain.mlp.norm
    feed_forward: Any = granite_moe.feed_forward(c, at, norm)
    if index in c.dense_layers:
        feed_forward = blocks.Mlp(norm, granite_moe.shared(c, f"{at}shared_mlp"))
    return mamba2.in_layer(c, index, llama.Layer(plain.attention, feed_forward))


def layer(
    ops: Ops, c: HybridConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    view = View(rotated=c.rotated)
    carry, state = mamba2.mixed(
        ops, c, w.attention, carry, step, state, index, view, sampled_step
    )
    carry = carry._replace(delta=carry.delta * c.block_scale)
    carry = moe.feed_forward(ops, c, w.mlp, carry)
    return carry._replace(delta=carry.delta * c.block_scale), state


def adapt(c: HybridConfig, checkpoint: Checkpoint) -> tuple[HybridConfig, Checkpoint]:
    """Add the weights of norms, which are ones."""
    assert c.mamba is not None, "the config was read"
    found = mamba2.with_constants(c.mamba, checkpoint, hybrid.recurrent_indices(c))
    return c, found


MODEL = replace(
    granite.MODEL, config=config, weights=weights, state=mamba2.states, layer=layer,
    adapt=adapt,
)  # fmt: skip
