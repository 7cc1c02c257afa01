"""Base of DeepSeek-V2 and V3: latent attention and shared experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError, RequestError
from inl.models import blocks, groups, llama, mla, mlp, moe, qwen3_moe
from inl.models.config import number, refuse_unless, whole
from inl.models.fields import changed
from inl.models.rope import kind_of, read_rope, rope_fields
from inl.ops.group_route import check_groups
from inl.spec.cache import State
from inl.spec.step import Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

Sparse = TypeVar("Sparse", bound=moe.MoeConfig)

DEFAULTS: Final = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Defaults of config fields of both generations."""


def common(hf: Mapping[str, Any]) -> mla.MlaConfig:
    """Read what both have in common: all but the routing."""
    refuse_unless(hf, "moe_layer_freq", 1)
    base = rotated(hf)
    dense = whole(hf, "first_k_dense_replace", least=0)
    size = whole(hf, "moe_intermediate_size")
    sparse = moe.with_experts(
        base, hf, count="n_routed_experts", expert_size=size,
        renormalize=False, dense_layers=tuple(range(min(dense, base.layers))),
        routed_scale=number(hf, "routed_scaling_factor", 1.0),
    )  # fmt: skip
    shared = sparse.expert_size * whole(hf, "n_shared_experts")
    return with_latents(hf, sparse, shared_size=shared)


def rotated(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read all but experts and latents; ``head_dim`` has the lanes that rotate."""
    refuse_unless(hf, "mlp_bias", False)
    plain, turned = whole(hf, "qk_nope_head_dim"), whole(hf, "qk_rope_head_dim")
    refuse_unless(hf, "head_dim", turned)
    refuse_unless(hf, "qk_head_dim", plain + turned)
    rope = read_rope(hf)
    base = llama.with_rope(changed(hf, head_dim=turned), rope)
    refuse_unless(hf, "num_key_value_heads", base.heads)
    return base


def with_latents(
    hf: Mapping[str, Any], base: llama.LlamaConfig, **given: Any
) -> mla.MlaConfig:
    """Add the sizes of latents to the config of :func:`rotated`."""
    plain, turned = whole(hf, "qk_nope_head_dim"), base.head_dim
    latent = whole(hf, "kv_lora_rank")
    queries = hf.get("q_lora_rank")
    found = {
        "kv_heads": 1,
        "head_dim": latent + turned,
        "attention_scale": (plain + turned) ** -0.5 * _warmth(hf) ** 2,
        "latent": latent,
        "query_latent": 0 if queries is None else whole(hf, "q_lora_rank"),
        "plain_dim": plain,
        "rotary_dim": turned,
        "value_dim": whole(hf, "v_head_dim"),
    }
    return llama.extended(mla.MlaConfig, base, **found | given)


KINDS: Final = ("dense", "sparse")
"""Accepted entries of ``mlp_layer_types``."""


def with_kinds(hf: Mapping[str, Any], c: Sparse) -> Sparse:
    """Return the config with the dense layers of ``mlp_layer_types``, if it is there.

    Raises :class:`CheckpointError` for another value than a kind for each layer.
    """
    types = hf.get("mlp_layer_types")
    if types is None:
        return c
    known = isinstance(types, (list, tuple)) and len(types) == c.layers
    if not known or any(kind not in KINDS for kind in types):
        raise CheckpointError(
            f"config field 'mlp_layer_types': found {show(types)}, expected a list of "
            f"{c.layers}, {' or '.join(KINDS)} for each layer"
        )
    dense = (index for index, kind in enumerate(types) if kind == "dense")
    return replace(c, dense_layers=tuple(dense))


def _warmth(hf: Mapping[str, Any]) -> float:
    """Return the root of YaRN's factor on attention scores."""
    rope = rope_fields(hf)
    if kind_of(rope) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor, weight = number(rope, "factor", 1.0), number(rope, "mscale_all_dim", 1.0)
    return 1 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0


def grouping(
    hf: Mapping[str, Any], c: moe.MoeConfig, kind: str, best_of: int
) -> moe.Grouping:
    """Read the groups of experts; raises :class:`CheckpointError`."""
    found = moe.Grouping(kind, whole(hf, "n_group"), whole(hf, "topk_group"), best_of)
    try:
        check_groups(c.experts, c.experts_per_token, *found[1:])
    except RequestError as error:
        raise CheckpointError(f"config field 'n_group': {error}") from None
    return found


def weights(c: mla.MlaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    layers = tuple(_layer(c, index) for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: mla.MlaConfig, index: int) -> llama.Layer:
    at = f"model.layers.{index}."
    norm = groups.norm(f"{at}post_attention_layernorm", c.hidden_size)
    attention = mla.attention_weights(c, at)
    if index in c.dense_layers:
        return llama.Layer(attention, blocks.Mlp(norm, mlp.weights(c, f"{at}mlp")))
    mixture = qwen3_moe.feed_forward(c, at, norm)._replace(
        shared=groups.gated(f"{at}mlp.shared_experts", c.hidden_size, c.shared_size)
    )
    if c.grouping is not None:
        bias = Param(
            f"{at}mlp.gate.e_score_correction_bias", (c.experts,), finite=True,
            wide=True, optional=c.grouping.kind == "softmax",
        )  # fmt: skip
        mixture = mixture._replace(bias=Group("group_route", bias=bias))
    return llama.Layer(attention, mixture)


def embed(ops: Ops, c: mla.MlaConfig, w: llama.Weights, step: Step) -> blocks.Carry:
    return blocks.embed(ops, replace(c, head_dim=c.rotary_dim), w.embed, step)


def layer(
    ops: Ops, c: mla.MlaConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    carry, state = mla.attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return moe.feed_forward(ops, c, w.mlp, carry), state


def adapt(c: Any, checkpoint: Checkpoint) -> tuple[Any, Checkpoint]:
    """Leave out the layers after the last, which predict several tokens at once."""
    extra = tuple(
        f"model.layers.{c.layers + number}."
        for number in range(_extra_layers(checkpoint.config))
    )
    names = [name for name in checkpoint.names() if not name.startswith(extra)]
    if len(names) == len(checkpoint.names()):
        return c, checkpoint
    pieces = {name: Piece((name,), checkpoint.spec(name)[1]) for name in names}
    return c, AdaptedCheckpoint(checkpoint, pieces)


def _extra_layers(hf: Mapping[str, Any]) -> int:
    for name in EXTRA_LAYERS:
        if hf.get(name) is not None:
            return whole(hf, name, least=0, most=64)
    return 0


EXTRA_LAYERS: Final = ("num_nextn_predict_layers", "num_mtp_layers")
"""Names of the number of layers for the prediction of several tokens."""

MODEL = replace(
    llama.MODEL,
    config=common,
    weights=weights,
    embed=embed,
    layer=layer,
    adapt=adapt,
)
"""Base of both generations, whose configs differ."""
