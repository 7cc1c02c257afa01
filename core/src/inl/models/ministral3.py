"""Ministral 3 (Mistral AI, 2025): Mistral whose queries grow with positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.models import blocks, llama, mistral
from inl.models.config import number, whole
from inl.models.fields import changed, with_defaults
from inl.models.rope import ORIGINAL, rope_fields
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "sliding_window": None,
}  # fmt: skip
"""Defaults of config fields that differ from Mistral's."""
ROPE: Final = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Rotation of a config that has none."""
GROWTH: Final = "llama_4_scaling_beta"


@dataclass(frozen=True, slots=True)
class Ministral3Config(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    gain: float = 0.0
    """Growth of queries with positions; 0 is none."""
    floor: int = 1
    """Tokens after which queries grow first."""


def config(hf: Mapping[str, Any]) -> Ministral3Config:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    if hf.get("rope_parameters") is None and hf.get("rope_scaling") is None:
        hf = with_defaults(hf, {}).changed({"rope_parameters": dict(ROPE)})
    hf = with_defaults(hf, DEFAULTS)
    fields = rope_fields(hf)
    rope = {name: value for name, value in fields.items() if name != GROWTH}
    base = mistral.config(changed(hf, rope_scaling=None, rope_parameters=rope))
    gain = number(fields, GROWTH, 0.0) if fields.get(GROWTH) else 0.0
    floor = whole(fields, ORIGINAL) if gain else 1
    return llama.extended(Ministral3Config, base, gain=gain, floor=floor)


def layer(
    ops: Ops, c: Ministral3Config, w: llama.Layer, carry: Any, step: Step,
    state: State, *, index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    view = c.views[index]
    residual, *heads = ops.norm_qkv(
        carry.residual, carry.delta, w.attention.norm, w.attention.qkv, eps=c.norm_eps
    )
    if c.gain:
        q, k, v = blocks.split_heads(heads, c.head_dim)
        q, k = ops.rope(q, k, carry.cos, carry.sin)
        # The op counts from 1, this family from 0.
        q = ops.temper_queries(q, step.positions - 1, floor=c.floor, gain=c.gain)
        heads, view = [q, k, v], view._replace(rotated=False)
    carry, state = blocks.attend_heads(
        ops, c, w.attention, carry._replace(residual=residual), heads, step, state,
        index=index, view=view, sampled_step=sampled_step,
    )  # fmt: skip
    return blocks.gated_mlp(ops, c, w.mlp, carry), state


MODEL = replace(llama.MODEL, config=config, layer=layer)
