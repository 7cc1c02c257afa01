"""Config of Gemma 4: kinds of layers, rotations, shared caches and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import gemma, llama
from inl.models.config import (
    cap,
    context_length,
    fields_of,
    flag,
    number,
    refuse_unless,
    whole,
)
from inl.models.fields import changed, with_defaults
from inl.models.rope import FULL, LOCAL, Rope, kind_of
from inl.models.views import one_full_in, views, windows
from inl.ops.rope import RopeScaling

THETA: Final = {FULL: 1e6, LOCAL: 1e4}
"""Default base frequencies of the kinds of layers."""
FULL_HEAD_DIM: Final = 512
"""Default of ``global_head_dim``."""
SHARE: Final = 0.25
"""Default share of lanes that rotate, of layers without a window."""
PATTERN: Final = 6
"""Default period of layers without a window."""
DEFAULTS: Final = {
    "num_key_value_heads": 4, "head_dim": gemma.HEAD_DIM,
    "max_position_embeddings": 131072, "sliding_window": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


@dataclass(frozen=True, slots=True)
class Gemma4Config(gemma.GemmaConfig):
    """Sizes and constants; those of heads are of layers with a window."""

    full_head_dim: int = FULL_HEAD_DIM
    """Lanes of a head of a layer without a window."""
    full_kv_heads: int = 1
    one_projection: bool = False
    """Whether the values of layers without a window are their keys, before norms."""
    sources: tuple[int, ...] = ()
    """Layer whose cache each layer attends to."""
    shared_size: int = 0
    """Inner size of the feed-forward layers that have no cache of their own."""
    input_size: int = 0
    """Lanes of the embedding that each layer has of a token; 0 for none."""
    input_vocab: int = 0
    experts: int = 0
    """Experts beside the dense feed-forward layer; 0 for none."""
    experts_per_token: int = 0
    expert_size: int = 0
    spans: bool = False
    """Whether the tokens of an image attend to each other in both directions, in the
    layers with a window."""
    pad: int = 0
    """Token id of the embedding that layers have of each token of an image."""


def config(hf: Mapping[str, Any]) -> Gemma4Config:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name, accepted in (
        ("use_bidirectional_attention", (None, False, "vision")),
        ("hidden_activation", (None, gemma.GELU)),
    ):
        if hf.get(name) not in accepted:
            raise CheckpointError(
                f"config field {name!r}: found {show(hf[name])}, accepted: "
                f"{', '.join(map(show, accepted))}"
            )
    refuse_unless(hf, "attention_bias", False)
    refuse_unless(hf, "mlp_bias", False)
    layers = whole(hf, "num_hidden_layers")
    kinds = hf.get("layer_types") or one_full_in(layers, period=PATTERN)
    if isinstance(kinds, list | tuple) and len(kinds) == layers:
        hf = changed(hf, layer_types=[*kinds[:-1], FULL])
    found = windows(hf, [FULL] * layers)
    one_projection = flag(hf, "attention_k_eq_v", False)
    dim, kv_heads = _full_heads(hf, found, one_projection)
    full = _rope(hf, FULL, dim, THETA[FULL], SHARE)
    local = _rope(hf, LOCAL, whole(hf, "head_dim"), THETA[LOCAL], 1.0)
    base = llama.with_rope(changed(hf, hidden_act=gemma.GELU), full)
    if base.heads % kv_heads:
        raise CheckpointError(
            f"config field 'num_global_key_value_heads': found {kv_heads}, expected a "
            f"divisor of num_attention_heads, {base.heads}"
        )
    wide = 2 if flag(hf, "use_double_wide_mlp", False) else 1
    size = whole(hf, "hidden_size_per_layer_input", 256, least=0)
    return llama.extended(
        Gemma4Config,
        base,
        views=views(found),
        head_norm=True,
        attention_scale=1.0,
        logit_cap=cap(hf, "final_logit_softcapping", None),
        embed_scale=base.hidden_size**0.5,
        norm_offset=0.0,
        local_rope=local[:2],
        full_head_dim=dim,
        full_kv_heads=kv_heads,
        one_projection=one_projection,
        sources=sources_of(hf, found),
        shared_size=wide * base.intermediate_size,
        input_size=size,
        input_vocab=_input_vocab(hf, base.vocab_size) if size else 0,
        spans=hf.get("use_bidirectional_attention") == "vision",
        pad=whole(hf, "pad_token_id", 0, least=0),
        **_experts(hf),
    )


def _full_heads(
    hf: Mapping[str, Any], found: tuple[int | None, ...], one_projection: bool
) -> tuple[int, int]:
    """Return lanes and key heads of layers without a window.

    ``per_layer_config`` has them as transformers writes them, for each such layer.
    """
    given = fields_of(hf, "per_layer_config")
    if given:
        full = [str(index) for index, window in enumerate(found) if window is None]
        first = given.get(full[0]) if full else None
        if (
            not isinstance(first, Mapping)
            or {*given} != {*full}
            or not {*first} <= {"head_dim", "num_key_value_heads"}
            or any(given[index] != first for index in full)
        ):
            raise CheckpointError(
                f"config field 'per_layer_config': found {show(given)}, accepted: "
                "head_dim and num_key_value_heads, alike for each layer of full "
                "attention"
            )
        hf = {**hf, **first}
        return whole(hf, "head_dim"), whole(hf, "num_key_value_heads")
    dim = whole(hf, "global_head_dim", FULL_HEAD_DIM)
    name = "num_global_key_value_heads"
    if not one_projection or hf.get(name) is None:
        name = "num_key_value_heads"
    return dim, whole(hf, name)


def _rope(
    hf: Mapping[str, Any], kind: str, dim: int, theta: float, share: float
) -> Rope:
    """Return the rotation of one kind of layers, of which a part of planes turns.

    Those of "proportional" have the frequencies of the first planes of whole heads.
    """
    parameters = fields_of(hf, "rope_parameters")
    default = {"rope_type": "proportional" if share != 1.0 else "default"}
    fields = fields_of(parameters, kind) if parameters else default
    theta = number(fields, "rope_theta", theta)
    accepted = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    name = kind_of(fields)
    if name not in ("default", "proportional") or not {*fields} <= accepted:
        raise CheckpointError(
            f"config field 'rope_parameters.{kind}': found {show(fields)}, accepted: "
            "the kinds default and proportional"
        )
    if name == "default":
        return Rope(theta, RopeScaling(), context_length(hf))
    share = number(fields, "partial_rotary_factor", share if not parameters else 1.0)
    factor = number(fields, "factor", 1.0)
    lanes = 2 * int(share * dim // 2)
    if not 0 < lanes <= dim:
        raise CheckpointError(
            f"config field 'rope_parameters.{kind}.partial_rotary_factor': found "
            f"{share:g}, accepted: above 0, and up to 1"
        )
    scaling = RopeScaling(
        "linear" if factor != 1.0 else "none", factor,
        rotary_dim=lanes if lanes < dim else 0,
    )  # fmt: skip
    return Rope(theta ** (lanes / dim), scaling, context_length(hf))


def sources_of(hf: Mapping[str, Any], found: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the layer whose cache each layer attends to."""
    shared = whole(hf, "num_kv_shared_layers", 0, least=0)
    own = len(found) - shared
    last = {window: index for index, window in enumerate(found[: max(own, 0)])}
    if not {*found} <= {*last}:
        raise CheckpointError(
            f"config field 'num_kv_shared_layers': found {shared}, expected to leave "
            "each kind of layers one with a cache"
        )
    return tuple(
        index if index < own else last[window] for index, window in enumerate(found)
    )


def _input_vocab(hf: Mapping[str, Any], vocab: int) -> int:
    size = whole(hf, "vocab_size_per_layer_input", 262144)
    if size < vocab:
        raise CheckpointError(
            f"config field 'vocab_size_per_layer_input': found {size}, expected at "
            f"least vocab_size, {vocab}"
        )
    return size


def _experts(hf: Mapping[str, Any]) -> dict[str, int]:
    if not flag(hf, "enable_moe_block", False):
        return {}
    experts, chosen = whole(hf, "num_experts"), whole(hf, "top_k_experts")
    if chosen > experts:
        raise CheckpointError(
            f"config field 'top_k_experts': found {chosen}, expected at most "
            f"num_experts, {experts}"
        )
    size = whole(hf, "moe_intermediate_size")
    return {"experts": experts, "experts_per_token": chosen, "expert_size": size}
