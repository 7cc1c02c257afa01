"""Config fields shared by the complexity-deep architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inl.errors import CheckpointError
from inl.models.config import (
    MAX_EPS,
    flag,
    number,
    whole,
)
from inl.models.rope import read_rope
from inl.ops.rope import RopeScaling

HEAD_EPS = 1e-6
"""Epsilon of the query and key norms, independent of ``norm_eps``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedConfig:
    """Sizes and constants of a checkpoint of either architecture."""

    vocab_size: int
    hidden_size: int
    expert_size: int
    """I: inner size of one expert."""
    experts: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied: bool
    qk_norm: bool
    window: int | None
    mu_attention: bool = True
    """Whether a projection of mu is added to queries, keys and values."""
    mu_router: bool = True
    """Whether a router over mu may override the expert of a token's id."""
    expert_table: bool = True
    """Whether the expert of each id is stored; else it is the id modulo experts."""
    dtype: str = "float32"
    """Compute dtype; the loader sets it."""


def common(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of :class:`RoutedConfig`; raises :class:`CheckpointError`."""
    hidden, heads = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    inner, experts = whole(hf, "intermediate_size"), whole(hf, "num_experts", 4)
    kv_heads = whole(hf, "num_key_value_heads", heads)
    _divides("num_attention_heads", heads, "hidden_size", hidden)
    _divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if hidden // heads % 2:
        raise CheckpointError(
            f"config field 'num_attention_heads': found {heads}, which makes heads of "
            f"{hidden // heads}; accepted: heads of an even size"
        )
    if experts > inner:
        raise CheckpointError(
            f"config field 'num_experts': found {experts}, expected at most "
            f"intermediate_size, {inner}"
        )
    if not flag(hf, "use_token_routed_mlp", True):
        raise CheckpointError(
            "config field 'use_token_routed_mlp': found false, accepted: true"
        )
    rope = read_rope(hf)
    eps = number(hf, "norm_eps", 1e-6, most=MAX_EPS)
    eps = number(hf, "rms_norm_eps", eps, most=MAX_EPS)
    sliding = hf.get("sliding_window") is not None
    return {
        "vocab_size": whole(hf, "vocab_size"),
        "hidden_size": hidden,
        "expert_size": inner // experts,
        "experts": experts,
        "layers": whole(hf, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_tokens": rope.max_tokens,
        "norm_eps": eps,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "tied": flag(hf, "tie_word_embeddings", False),
        "qk_norm": flag(hf, "use_qk_norm", True),
        "window": whole(hf, "sliding_window") if sliding else None,
    }


def _divides(name: str, value: int, of: str, total: int) -> None:
    if total % value:
        raise CheckpointError(
            f"config field {name!r}: found {value}, expected a divisor of {of}, {total}"
        )
