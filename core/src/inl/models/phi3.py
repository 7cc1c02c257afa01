"""Phi-3 and Phi-4-mini (Abdin et al., 2024): Llama with fused matrices.

Checkpoints fuse query, key and value rows in one tensor, gate and up rows in another;
each logical tensor is a range of rows. If only the first lanes of a head rotate, rows
of queries and keys are also permuted, so that the two lanes of a rotating plane are
half a head apart, as ``rope`` expects. The same permutation of queries and keys does
not change attention scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from inl.errors import CheckpointError
from inl.models import blocks, groups, llama, mlp
from inl.models.config import context_length, number, refuse_unless
from inl.models.fields import with_defaults
from inl.models.rope import (
    ORIGINAL,
    THETA,
    Rope,
    kind_of,
    note_unknown,
    original,
    rope_fields,
    rotating_lanes,
)
from inl.models.views import one_window, views
from inl.ops.rope import RopeScaling
from inl.spec.weights import Group

LONG = ("longrope", "su", "yarn")
"""Names of LongRoPE in config files."""
FIELDS = "short_factor", "long_factor", "factor", "attention_factor"
"""Fields of LongRoPE."""
DEFAULTS = {
    "max_position_embeddings": 4096,
    ORIGINAL: 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field.

    With LongRoPE (Ding et al., 2024) the context is the one in training, which uses the
    short factors. A longer one uses other factors for all of its tokens: ``longer``.
    """
    hf = with_defaults(hf, DEFAULTS)
    rope = rope_fields(hf)
    kind = kind_of(rope)
    if kind not in ("default", *LONG):
        raise CheckpointError(
            f"config field 'rope_scaling.rope_type': found {kind!r:.80}, "
            f"accepted: default, {', '.join(LONG)}"
        )
    for name in ("attention_bias", "mlp_bias"):
        refuse_unless(hf, name, False)
    theta = number(rope, "rope_theta", THETA)
    base = llama.with_rope(hf, Rope(theta, RopeScaling(), context_length(hf)))
    share = number(rope, "partial_rotary_factor", 1.0)
    scaling = RopeScaling(rotary_dim=rotating_lanes(share, base.head_dim))
    base = replace(base, views=views(one_window(hf, base.layers, base.max_tokens)))
    if kind not in LONG:
        note_unknown(rope, hf, ())
        return replace(base, rope_scaling=scaling)
    note_unknown(rope, hf, FIELDS)
    tokens = original(rope)
    short = _long(scaling, rope, base, "short_factor")
    if tokens >= base.max_tokens:
        return replace(base, rope_scaling=short)
    longer = None
    if rope.get("long_factor") is not None:
        longer = base.max_tokens, _long(scaling, rope, base, "long_factor")
    return replace(base, rope_scaling=short, max_tokens=tokens, longer=longer)


def _long(
    scaling: RopeScaling, rope: Mapping[str, Any], base: llama.LlamaConfig, name: str
) -> RopeScaling:
    """Read LongRoPE with the factors ``name``."""
    factors, tokens = rope.get(name), original(rope)
    count = (scaling.rotary_dim or base.head_dim) // 2
    fits = isinstance(factors, (list, tuple)) and len(factors) == count
    if not fits or not all(type(x) in (int, float) and x > 0 for x in factors or ()):
        raise CheckpointError(
            f"config field 'rope_scaling.{name}': found {factors!r:.80}, "
            f"expected {count} numbers above 0"
        )
    factor = number(rope, "factor", base.max_tokens / tokens)
    default = math.sqrt(1 + math.log(factor) / math.log(tokens)) if factor > 1 else 1.0
    divisors = tuple(float(each) for each in factors or ())
    gain = number(rope, "attention_factor", default)
    return scaling._replace(kind="divided", divisors=divisors, gain=gain)


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    h = c.hidden_size
    keys = c.heads * c.head_dim
    values = keys + c.kv_heads * c.head_dim
    total = values + c.kv_heads * c.head_dim
    qkv = f"{at}self_attn.qkv_proj.weight"
    turned = partial(groups.rotary_rows, c.head_dim, c.rope_scaling.rotary_dim)
    return llama.Layer(
        blocks.Attention(
            groups.norm(f"{at}input_layernorm", h),
            Group(
                "qkv_linear",
                q=groups.rows(qkv, turned(c.heads), total, h),
                k=groups.rows(qkv, turned(c.kv_heads, start=keys), total, h),
                v=groups.rows(qkv, ((values, total),), total, h),
            ),
            groups.out(c, at),
        ),
        blocks.Mlp(
            groups.norm(f"{at}post_attention_layernorm", h),
            mlp.fused_weights(c, f"{at}mlp"),
        ),
    )


MODEL = replace(llama.MODEL, config=config, weights=weights)
