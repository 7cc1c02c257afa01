"""Mellum 2 (JetBrains, 2026): Qwen3-MoE with windows, rotated with another base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, deepseek, llama, moe, qwen3_moe
from inl.models.config import refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.rope import ORIGINAL, THETA, local_ropes
from inl.models.views import views, windows
from inl.ops.rope import RopeScaling
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

FULL_THETA: Final = 5e5
DEFAULTS: Final = {
    **qwen3_moe.DEFAULTS, "head_dim": 128, "max_position_embeddings": 131072,
    "sliding_window": 1024, "moe_intermediate_size": 896, "norm_topk_prob": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
EXPERTS: Final = 64
OF_ONE_ROTATION: Final = (
    "rope_theta", "rope_scaling", "partial_rotary_factor", ORIGINAL,
)  # fmt: skip
"""Fields that are accepted in ``rope_parameters`` of a kind of layer only."""


@dataclass(frozen=True, slots=True)
class MellumConfig(moe.MoeConfig):
    """Sizes and constants of one checkpoint."""

    local_rope: tuple[float, RopeScaling] | None = None
    """Base frequency and scaling of layers with a window."""


def config(hf: Mapping[str, Any]) -> MellumConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    for name in OF_ONE_ROTATION:
        # transformers ignores them in this family, whose layers rotate differently.
        refuse_unless(hf, name, None)
    full, local = local_ropes(hf, FULL_THETA, THETA)
    base = llama.with_rope(hf, full)
    kinds = ["full_attention"] * base.layers
    base = replace(base, head_norm=True, views=views(windows(hf, kinds)))
    plain = changed(hf, use_sliding_window=False, mlp_only_layers=None)
    sparse = qwen3_moe.sparse(base, plain, experts=EXPERTS)
    found = llama.extended(MellumConfig, sparse, local_rope=local[:2])
    return deepseek.with_kinds(hf, found)


def embed(ops: Ops, c: MellumConfig, w: Any, step: Step) -> blocks.LocalCarry:
    return blocks.embed_local(ops, c, w.embed, step)


def layer(
    ops: Ops, c: MellumConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    cos, sin = carry.tables(c.views[index])
    own, state = moe.layer(
        ops, c, w, carry._replace(cos=cos, sin=sin), step, state, index=index,
        sampled_step=sampled_step,
    )  # fmt: skip
    return carry._replace(residual=own.residual, delta=own.delta), state


def adapt(c: Any, checkpoint: Checkpoint) -> tuple[Any, Checkpoint]:
    """Leave out the layers that predict further tokens."""
    return deepseek.adapt(c, checkpoint)


MODEL = replace(
    llama.MODEL, config=config, weights=qwen3_moe.weights, embed=embed, layer=layer,
    adapt=adapt,
)  # fmt: skip
