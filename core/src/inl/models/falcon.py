"""Falcon (Almazrouei et al., 2023): blocks in parallel, heads that share keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray
from inl.models import gpt_neox, layer_norm, llama, mlp
from inl.models.config import MAX_EPS, flag, number, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed

DEFAULTS: Final = {
    "tie_word_embeddings": True, "activation": "gelu", "ffn_hidden_size": None,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
RENAMES: Final = {
    r"rotary_emb\.inv_freq$": "",
    r"^(transformer\.)?h\.": "model.layers.",
    r"^(transformer\.)?word_embeddings\.": "model.embed_tokens.",
    r"^(transformer\.)?ln_f\.": "model.norm.",
    r"\.ln_attn\.": ".input_layernorm.",
    r"\.ln_mlp\.": ".post_attention_layernorm.",
    r"\.self_attention\.dense\.": ".self_attn.o_proj.",
    r"\.self_attention\.": ".self_attn.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> gpt_neox.NeoxConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "alibi", False)
    grouped = flag(hf, "new_decoder_architecture", False)
    shared = flag(hf, "multi_query", True)
    keys = hf.get("num_kv_heads") if grouped else 1 if shared else None
    parallel = flag(hf, "parallel_attn", True)
    norms = hf.get("num_ln_in_parallel_attn")
    norms = (2 if grouped else 1) if norms is None else norms
    refuse_unless({"num_ln_in_parallel_attn": norms}, "num_ln_in_parallel_attn",
                  2 if grouped and norms == 2 else 1)  # fmt: skip
    if grouped:
        refuse_unless(hf, "parallel_attn", True)
    inner, bias = hf["ffn_hidden_size"], flag(hf, "bias", False)
    hf = changed(
        hf, num_key_value_heads=keys, head_dim=None, attention_bias=bias, mlp_bias=bias,
        intermediate_size=4 * whole(hf, "hidden_size") if inner is None else inner,
        hidden_act=hf["activation"],
        rms_norm_eps=number(hf, "layer_norm_epsilon", 1e-5, most=MAX_EPS),
    )  # fmt: skip
    base = llama.config(hf)
    one_norm = parallel and norms == 1
    return llama.extended(
        gpt_neox.NeoxConfig, base, parallel=parallel, shared_norm=one_norm
    )


def weights(c: gpt_neox.NeoxConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.dense_h_to_4h", f"{stem}.dense_4h_to_h")

    return layer_norm.weights(c, inner, shared=c.shared_norm)


def adapt(
    c: gpt_neox.NeoxConfig, checkpoint: Checkpoint
) -> tuple[gpt_neox.NeoxConfig, AdaptedCheckpoint]:
    """Rename tensors, and separate queries, keys and values of each group of heads."""

    def split(name: str, new: str, shape: tuple[int, ...]) -> dict[str, Piece] | None:
        stem, fused, field = new.partition("query_key_value")
        if not fused:
            return None
        queries = c.heads // c.kv_heads
        spans = {"q": (0, queries), "k": (queries, queries + 1)}
        spans["v"] = queries + 1, queries + 2
        return {
            f"{stem}{part}_proj{field}": Piece(
                (name,),
                ((stop - start) * c.kv_heads * c.head_dim, *shape[1:]),
                partial(_heads, c, start, stop),
            )
            for part, (start, stop) in spans.items()
        }

    return c, renamed(checkpoint, RENAMES, split)


def _heads(
    c: llama.LlamaConfig, start: int, stop: int, stored: Sequence[HostArray]
) -> HostArray:
    """Return the rows of some heads of each group of a fused matrix or bias."""
    array = stored[0]
    total, *rest = array.data.shape
    groups = array.data.reshape(c.kv_heads, total // (c.kv_heads * c.head_dim), -1)
    rows = (stop - start) * c.kv_heads * c.head_dim
    data = np.ascontiguousarray(groups[:, start:stop]).reshape(rows, *rest)
    return HostArray(data, array.dtype, (rows, *array.shape[1:]))


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=gpt_neox.layer,
    head=layer_norm.head, adapt=adapt,
)  # fmt: skip
