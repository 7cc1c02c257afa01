"""Qwen3.5 (Qwen team, 2026): the layers of Qwen3-Next without experts.

The projections of recurrent layers are tensors of their own. Planes of the rotation
turn by positions along three axes, interleaved, which differ for features of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from inl.errors import CheckpointError
from inl.models import groups, llama, moe, qwen3_next
from inl.models.config import refuse_unless
from inl.models.fields import with_defaults
from inl.models.rope import axes_of, rope_fields

DEFAULTS: Final = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
"""Defaults of config fields that differ from Llama's."""
SECTION: Final = "mrope_section"
SECTIONS: Final = [11, 11, 10]
"""Default planes of each axis of positions."""


def config(hf: Mapping[str, Any]) -> qwen3_next.NextConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = attention_config(hf)
    dense = tuple(range(base.layers))
    sparse: moe.MoeConfig = llama.extended(moe.MoeConfig, base, dense_layers=dense)
    return qwen3_next.recurrent_config(hf, sparse)


def attention_config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read the fields of a dense model."""
    refuse_unless(hf, "attn_output_gate", True)
    rope = rope_fields(hf)
    is_stated = rope.get(SECTION) is not None
    sections = rope.pop(SECTION, None) or SECTIONS
    rope.pop("mrope_interleaved", None)
    base = qwen3_next.attention_config(hf, rope)
    axes = axes_of({SECTION: sections, "mrope_interleaved": True})
    planes = (base.rope_scaling.rotary_dim or base.head_dim) // 2
    if len(axes) != planes:
        if is_stated:
            raise CheckpointError(
                f"config field 'rope_parameters.{SECTION}': found {len(axes)} planes, "
                f"expected {planes}, of lanes that rotate"
            )
        return base  # of text alone
    return replace(base, rope_scaling=base.rope_scaling._replace(axes=axes))


def delta_inputs(c: qwen3_next.NextConfig, own: str) -> qwen3_next.DeltaInputs:
    """Return the projections of a recurrent layer with name prefix ``own``."""
    inner, heads = c.value_heads * c.value_dim, c.value_heads
    return qwen3_next.DeltaInputs(
        mixed=groups.linear(f"{own}in_proj_qkv", c.channels, c.hidden_size),
        gate=groups.linear(f"{own}in_proj_z", inner, c.hidden_size),
        strength=groups.linear(f"{own}in_proj_b", heads, c.hidden_size),
        rate=groups.linear(f"{own}in_proj_a", heads, c.hidden_size),
    )


MODEL = replace(
    qwen3_next.MODEL,
    config=config,
    weights=partial(qwen3_next.weights, inputs=delta_inputs),
)
