"""Phi-3 and Phi-4-mini (Abdin et al., 2024): Llama with fused matrices.

Checkpoints hold queries, keys and values in one tensor, gate and up in another: each
logical tensor is a cut of rows. Where only the first lanes of a head rotate, the rows
of queries and keys are also put in an order in which the lanes that turn together lie
half a head apart, as ``rope`` takes them; scores do not change when queries and keys
are reordered alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.errors import CheckpointError
from inl.models import blocks, groups, llama
from inl.models.config import number, original, rope_fields
from inl.models.views import one_window, views
from inl.ops.rope import RopeScaling
from inl.spec.weights import Group, Param, RowSlices

LONG = ("longrope", "su", "yarn")
"""Names that files have had for LongRoPE."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field.

    With LongRoPE (Ding et al., 2024) the context is the one trained on, which takes the
    short divisors. Beyond it others hold for all of a text's tokens at once, so that
    what is cached would be wrong.
    """
    rope = rope_fields(hf)
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if kind not in ("default", *LONG):
        raise CheckpointError(
            f"config field 'rope_scaling.rope_type': found {kind!r:.80}, "
            f"accepted: default, {', '.join(LONG)}"
        )
    plain = {"rope_theta": number(rope, "rope_theta", 10000.0)}
    base = llama.config({**hf, "partial_rotary_factor": None, "rope_parameters": plain})
    scaling, tokens = _turning(rope, base.head_dim), base.max_tokens
    if kind in LONG:
        tokens = min(original(rope, hf), tokens)
        scaling = _long(scaling, rope, base, tokens)
    seen = one_window(hf, base.layers, tokens)
    return replace(base, rope_scaling=scaling, max_tokens=tokens, views=views(seen))


def _turning(rope: Mapping[str, Any], dim: int) -> RopeScaling:
    """Let only the first lanes of a head turn, where the config says so."""
    share = number(rope, "partial_rotary_factor", 1.0)
    turning = int(dim * share + 1e-6)  # a share of thirds is rounded down
    if share > 1 or turning % 2 or not turning:
        raise CheckpointError(
            f"config field 'partial_rotary_factor': found {share!r}, accepted: what "
            f"leaves an even number of the {dim} lanes of a head"
        )
    return RopeScaling(turning=turning if turning < dim else 0)


def _long(
    scaling: RopeScaling, rope: Mapping[str, Any], base: llama.LlamaConfig, tokens: int
) -> RopeScaling:
    """LongRoPE within the context of ``tokens`` that was trained on."""
    found, count = rope.get("short_factor"), (scaling.turning or base.head_dim) // 2
    fits = isinstance(found, (list, tuple)) and len(found) == count
    if not fits or not all(type(x) in (int, float) and x > 0 for x in found or ()):
        raise CheckpointError(
            f"config field 'rope_scaling.short_factor': found {found!r:.80}, "
            f"expected {count} numbers above 0"
        )
    factor = number(rope, "factor", base.max_tokens / tokens)
    warmth = math.sqrt(1 + math.log(factor) / math.log(tokens)) if factor > 1 else 1.0
    divisors = tuple(float(each) for each in found or ())
    gain = number(rope, "attention_factor", warmth)
    return scaling._replace(kind="divided", divisors=divisors, gain=gain)


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """What to load, under its Hugging Face names; no bytes are read."""
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    h, inner = c.hidden_size, c.intermediate_size
    keys = c.heads * c.head_dim
    values = keys + c.kv_heads * c.head_dim
    total = values + c.kv_heads * c.head_dim
    qkv, mlp = f"{at}self_attn.qkv_proj.weight", f"{at}mlp.gate_up_proj.weight"

    def rows(source: str, spans: tuple[tuple[int, int], ...], total: int) -> Param:
        count = sum(stop - start for start, stop in spans)
        return Param(source, (count, h), axis=0, row_slices=RowSlices(spans, total))

    return llama.Layer(
        blocks.Attention(
            groups.norm(f"{at}input_layernorm", h),
            Group(
                "qkv_linear",
                q=rows(qkv, _halves(c, 0, c.heads), total),
                k=rows(qkv, _halves(c, keys, c.kv_heads), total),
                v=rows(qkv, ((values, total),), total),
            ),
            groups.out(c, at),
        ),
        blocks.Mlp(
            groups.norm(f"{at}post_attention_layernorm", h),
            Group(
                "gated_mlp",
                gate=rows(mlp, ((0, inner),), 2 * inner),
                up=rows(mlp, ((inner, 2 * inner),), 2 * inner),
                down=Param(f"{at}mlp.down_proj.weight", (h, inner), axis=1),
            ),
        ),
    )


def _halves(
    c: llama.LlamaConfig, start: int, heads: int
) -> tuple[tuple[int, int], ...]:
    """Rows of heads from ``start``, pairs of turning lanes half a head apart."""
    dim, turning = c.head_dim, c.rope_scaling.turning
    if not turning:
        return ((start, start + heads * dim),)
    half, still = turning // 2, (dim - turning) // 2
    edges = (
        (0, half),
        (turning, turning + still),
        (half, turning),
        (turning + still, dim),
    )
    return tuple(
        (start + head * dim + first, start + head * dim + last)
        for head in range(heads)
        for first, last in edges
    )


MODEL = replace(llama.MODEL, config=config, weights=weights)
