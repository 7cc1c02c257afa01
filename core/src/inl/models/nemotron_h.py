"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): each layer is one block, of four kinds.

A layer is Mamba-2, attention without positions, a feed-forward layer without a gate or
a mixture of such experts. transformers raises the steps of time of a prompt, but not
those of generated tokens, to ``time_step_min``, which only initializes weights in
NVIDIA's own code: here no step is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, deepseek, groups, hybrid, llama, mamba2, mlp, moe
from inl.models.config import (
    MAX_EPS,
    MIN_CONTEXT,
    flag,
    number,
    refuse_unless,
    whole,
)
from inl.models.fields import changed, with_defaults
from inl.models.mlp import OpenMlp
from inl.models.renames import renamed
from inl.models.rope import THETA, Rope
from inl.models.views import View
from inl.ops.group_route import ExpertBias
from inl.ops.linear import Linear
from inl.ops.moe import ExpertLinear
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "use_conv_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "n_group": 1, "topk_group": 1, "layers_block_type": None,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
OLD_NAMES: Final = {
    "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias", "time_step_limit": "mamba_dt_limit",
}  # fmt: skip
"""Fields, and their names in old configs, which come first."""
UNUSED: Final = (
    "expand", "mamba_expand", "chunk_size", "mamba_chunk_size", "time_step_min",
    "time_step_max", "time_step_floor", "mamba_dt_min", "mamba_dt_max",
    "mamba_dt_init_floor", "num_logits_to_keep", "rescale_prenorm_residual",
    "residual_in_fp32", "mamba_proj_bias", "moe_shared_expert_overlap",
    "mamba_ssm_cache_dtype", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    "n_shared_experts", "attention_bias", "sliding_window", "num_hidden_layers",
    "rope_theta", "partial_rotary_factor", "norm_eps", "rms_norm_eps",
)  # fmt: skip
"""Fields without an effect on the logits."""
PATTERN: Final = {
    "M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"
}  # fmt: skip
"""Kinds of layers, by their letters in ``hybrid_override_pattern``."""
OLD_KINDS: Final = {"mamba": "linear_attention", "attention": "full_attention"}
RENAMES: Final = {
    r"^mtp\..*$": "",
    r"^backbone\.": "model.",
    r"^model\.embeddings\.": "model.embed_tokens.",
    r"^model\.norm_f\.": "model.norm.",
    r"\.mixer\.([qkvo])_proj\.": r".self_attn.\1_proj.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


@dataclass(frozen=True, slots=True)
class NemotronConfig(moe.MoeConfig):
    """Sizes and constants of one checkpoint."""

    kinds: tuple[str, ...] = ()
    """Kind of each layer, of :data:`PATTERN`."""
    mamba: mamba2.Sizes | None = None
    latent: int = 0
    """Lanes that experts read and return; 0 is the hidden lanes."""

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """Whether each layer has no cache of keys and values."""
        return tuple(kind != "full_attention" for kind in self.kinds)


class Mixture(NamedTuple):
    """A mixture of experts without gates: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    router: Linear | Group
    bias: ExpertBias | Group
    up: ExpertLinear | Group
    down: ExpertLinear | Group
    shared: OpenMlp
    enter: Linear | Group | None
    """[latent, H], before the experts."""
    leave: Linear | Group | None
    """[H, latent], after the experts."""


def config(hf: Mapping[str, Any]) -> NemotronConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, {})
    hf = changed(hf, **{new: hf[old] for new, old in OLD_NAMES.items() if old in hf})
    hf = with_defaults(hf, DEFAULTS)
    for name in UNUSED:
        hf.get(name)
    refuse_unless(hf, "use_bias", False)
    refuse_unless(hf, "attention_head_dim", hf["head_dim"])
    kinds = _kinds(hf)
    tokens = whole(hf, "max_position_embeddings", least=MIN_CONTEXT)
    plain = changed(
        hf, num_hidden_layers=len(kinds), attention_bias=False,
        hidden_act=hf["mlp_hidden_act"],
        rms_norm_eps=number(hf, "layer_norm_epsilon", 1e-5, most=MAX_EPS),
    )  # fmt: skip
    base = llama.with_rope(plain, Rope(THETA, RopeScaling(), tokens))
    sparse = moe.with_experts(
        base, hf, count="n_routed_experts", gated=False,
        expert_size=whole(hf, "moe_intermediate_size"),
        renormalize=flag(hf, "norm_topk_prob", True),
        shared_size=whole(hf, "moe_shared_expert_intermediate_size"),
        routed_scale=number(hf, "routed_scaling_factor", 1.0),
    )  # fmt: skip
    latent = hf.get("moe_latent_size")
    return llama.extended(
        NemotronConfig, sparse, kinds=kinds,
        grouping=deepseek.grouping(hf, sparse, "sigmoid", 2), mamba=_sizes(hf),
        latent=0 if latent is None else whole(hf, "moe_latent_size"),
    )  # fmt: skip


def _kinds(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer."""
    for field in ("layers_block_type", "layer_types"):
        if hf.get(field) is not None:
            types = hf[field]
            if isinstance(types, (list, tuple)) and all(
                isinstance(kind, str) for kind in types
            ):
                types = [OLD_KINDS.get(kind, kind) for kind in types]
            break
    else:
        field = "hybrid_override_pattern"
        pattern = hf.get(field)
        types = [PATTERN.get(letter, letter) for letter in str(pattern)]
    hf.get("hybrid_override_pattern")  # which has no effect beside the others
    recurrent = {kind: kind != "full_attention" for kind in PATTERN.values()}
    count = len(types) if isinstance(types, (list, tuple)) else 0
    hybrid.recurrent_layers(types, max(count, 1), recurrent, field)
    return tuple(types)


def _sizes(hf: Mapping[str, Any]) -> mamba2.Sizes:
    names = {
        "mamba_n_heads": "mamba_num_heads", "mamba_n_groups": "n_groups",
        "mamba_d_head": "mamba_head_dim", "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
        "hidden_act": "mamba_hidden_act",
    }  # fmt: skip
    given = {name: hf[own] for name, own in names.items()}
    inner = whole(hf, "mamba_num_heads") * whole(hf, "mamba_head_dim")
    return mamba2.read(changed(hf, mamba_proj_bias=False, **given), inner)


def weights(c: NemotronConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    layers: Any = tuple(_layer(c, index) for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: NemotronConfig, index: int) -> Any:
    assert c.mamba is not None, "the config was read"
    at, h = f"model.layers.{index}.", c.hidden_size
    norm, stem = groups.norm(f"{at}norm", h), f"{at}mixer"
    if c.kinds[index] == "linear_attention":
        return mamba2.Block(norm, mamba2.weights(c.mamba, stem, h))
    if c.kinds[index] == "full_attention":
        return blocks.Attention(norm, groups.qkv(c, at), groups.out(c, at))
    if c.kinds[index] == "mlp":
        return blocks.Mlp(norm, _mlp(c, stem))
    return _mixture(c, norm, stem)


def _mlp(c: NemotronConfig, stem: str) -> OpenMlp:
    return mlp.ungated(c, f"{stem}.up_proj", f"{stem}.down_proj")


def _mixture(c: NemotronConfig, norm: Group, stem: str) -> Mixture:
    h, lanes, inner = c.hidden_size, c.latent or c.hidden_size, c.expert_size

    def experts(name: str, rows: int, columns: int, axis: int) -> Group:
        shape = c.experts, rows, columns
        every = Param(f"{stem}.experts.{name}_proj", shape, axis=axis)
        each = every._replace(
            source=f"{stem}.experts.{{}}.{name}_proj.weight", stack=c.experts
        )
        return Group("expert_linear", weight=each._replace(aliases=(every,)))

    def turn(name: str, rows: int, columns: int) -> Group | None:
        source = f"{stem}.{name}_latent_proj"
        found = groups.linear(source, rows, columns, bias=c.mlp_bias)
        return found if c.latent else None

    bias = Param(
        f"{stem}.gate.e_score_correction_bias", (c.experts,), finite=True, wide=True
    )
    shared = replace(c, intermediate_size=c.shared_size)
    return Mixture(
        norm,
        moe.router(c, f"{stem}.gate.weight"),
        Group("group_route", bias=bias),
        experts("up", inner, lanes, 1),
        experts("down", lanes, inner, 2),
        _mlp(shared, f"{stem}.shared_experts"),
        turn("fc1", lanes, h),
        turn("fc2", h, lanes),
    )


def layer(
    ops: Ops, c: NemotronConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    if c.kinds[index] in ("linear_attention", "full_attention"):
        return mamba2.mixed(
            ops, c, w, carry, step, state, index, View(rotated=False), sampled_step
        )
    if sampled_step is not None:
        residual, delta = (
            ops.take_rows(each, step.samples) for each in (carry.residual, carry.delta)
        )
        carry = carry._replace(residual=residual, delta=delta)
    run: Any = mixture if c.kinds[index] == "moe" else blocks.gated_mlp
    return run(ops, c, w, carry), state


def mixture(
    ops: Ops, c: NemotronConfig, w: Mixture, carry: blocks.Carry
) -> blocks.Carry:
    """Mixture of experts without gates, beside one for every token."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    assert c.grouping is not None, "the config was read"
    ids, shares = ops.group_route(
        ops.linear(x, w.router), w.bias, k=c.experts_per_token,
        renormalize=c.renormalize, **c.grouping._asdict(),
    )  # fmt: skip
    given: Array = x if w.enter is None else ops.linear(x, w.enter)
    inner = ops.expert_linear(given.reshape(x.shape[0], 1, -1), ids, w.up)
    inner = ops.activate(inner, kind=c.activation)
    shares = shares * c.routed_scale
    out = ops.combine_experts(ops.expert_linear(inner, ids, w.down), shares)
    out = out if w.leave is None else ops.linear(out, w.leave)
    shared = mlp.feed_forward(ops, x, w.shared, c.activation)
    return carry._replace(residual=residual, delta=out + shared)


def adapt(
    c: NemotronConfig, checkpoint: Checkpoint
) -> tuple[NemotronConfig, Checkpoint]:
    """Rename tensors, and add the weights of norms, which are ones."""
    assert c.mamba is not None, "the config was read"
    layers = [i for i, kind in enumerate(c.kinds) if kind == "linear_attention"]
    found = renamed(checkpoint, RENAMES)
    return c, mamba2.with_constants(c.mamba, found, layers, "mixer")


def state(c: NemotronConfig) -> Any:
    """Return the cache group of the layers with attention, then recurrent state."""
    assert c.mamba is not None, "the config was read"
    found: tuple[Any, ...] = (hybrid.attention_state(c),)
    for index, kind in enumerate(c.kinds):
        if kind == "linear_attention":
            found += mamba2.state(c.mamba, index, c.dtype)
    return found


MODEL = replace(
    llama.MODEL, config=config, weights=weights, state=state, layer=layer, adapt=adapt
)
