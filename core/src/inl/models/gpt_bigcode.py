"""GPT-BigCode (2023), SantaCoder and StarCoder: GPT-2 whose heads share one key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import gpt2, layer_norm, llama, opt
from inl.models.config import MAX_EPS, flag, number, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import range_of_rows, renamed, third

DEFAULTS: Final = {"activation_function": "gelu_pytorch_tanh"}
"""Defaults of config fields that differ from those of GPT-2."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    given = {name: hf[old] for name, old in gpt2.NAMES.items() if old in hf}
    hf = with_defaults(changed(hf, **given), gpt2.DEFAULTS)
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        hf.get(name)  # no effect on the results
    inner = hf["n_inner"]
    base = opt.positioned(
        hf, intermediate_size=4 * whole(hf, "hidden_size") if inner is None else inner,
        hidden_act=hf["activation_function"],
        num_key_value_heads=1 if flag(hf, "multi_query", True) else None,
        rms_norm_eps=number(hf, "layer_norm_epsilon", 1e-5, most=MAX_EPS),
    )  # fmt: skip
    scale = None if flag(hf, "scale_attn_weights", True) else 1.0
    return replace(base, attention_scale=scale)


def adapt(
    c: llama.LlamaConfig, checkpoint: Checkpoint
) -> tuple[llama.LlamaConfig, AdaptedCheckpoint]:
    """Rename tensors, and separate queries, keys and values."""
    return c, renamed(checkpoint, gpt2.RENAMES, partial(_split, c))


def _split(
    c: llama.LlamaConfig, name: str, new: str, shape: tuple[int, ...]
) -> dict[str, Piece] | None:
    stem, fused, field = new.partition("c_attn")
    if not fused:
        return None
    if c.kv_heads == c.heads:
        return {
            f"{stem}{part}_proj{field}": third(name, shape, index, heads=c.heads)
            for index, part in enumerate("qkv")
        }
    at, pieces = 0, {}
    for part, heads in (("q", c.heads), ("k", 1), ("v", 1)):
        stop = at + heads * c.head_dim
        pieces[f"{stem}{part}_proj{field}"] = range_of_rows(name, shape, at, stop)
        at = stop
    return pieces


MODEL = replace(
    llama.MODEL, config=config, weights=gpt2.weights, embed=gpt2.embed,
    layer=layer_norm.layer, head=layer_norm.head, adapt=adapt,
)  # fmt: skip
