"""GPT-Neo (Black et al., 2021): GPT-2 with windows by layer, and unscaled scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import gpt2, layer_norm, llama, opt
from inl.models.config import MAX_EPS, number, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed
from inl.models.views import views

NAMES: Final = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
"""Fields of Llama's config, and GPT-Neo's names of them."""
DEFAULTS: Final = {
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "intermediate_size": None, "activation_function": "gelu_new",
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
KINDS: Final = {"global": False, "local": True}
"""Kinds of layers, and whether they have a window."""
RENAMES: Final = {
    r"\.attn\.attention\.(masked_)?bias$": "",
    **gpt2.RENAMES,
    r"\.attn\.attention\.out_proj\.": ".self_attn.o_proj.",
    r"\.attn\.attention\.": ".self_attn.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, {})
    given = {name: hf[old] for name, old in NAMES.items() if old in hf}
    hf = with_defaults(changed(hf, **given), DEFAULTS)
    inner = hf["intermediate_size"]
    base = opt.positioned(
        hf, intermediate_size=4 * whole(hf, "hidden_size") if inner is None else inner,
        hidden_act=hf["activation_function"],
        rms_norm_eps=number(hf, "layer_norm_epsilon", 1e-5, most=MAX_EPS),
    )  # fmt: skip
    size = whole(hf, "window_size", 256)
    local = [size if KINDS[kind] else None for kind in _kinds(hf, base.layers)]
    still = views(local, (False,) * base.layers)
    return replace(base, views=still, attention_scale=1.0, qkv_bias=False)


def _kinds(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer, of pairs of a list of kinds and how often."""
    kinds = hf.get("attention_layers")
    if kinds is None:
        given = hf.get("attention_types") or [[["global", "local"], -(-layers // 2)]]
        try:
            kinds = [kind for some, count in given for kind in list(some) * count]
        except (TypeError, ValueError):
            kinds = given
        kinds = kinds[:layers] if hf.get("attention_types") is None else kinds
    if len(kinds) != layers or any(
        not isinstance(kind, str) or kind not in KINDS for kind in kinds
    ):
        raise CheckpointError(
            f"config field 'attention_types': found {show(kinds)}, expected one of "
            f"{', '.join(KINDS)} for each of {layers} layers"
        )
    return list(kinds)


def adapt(
    c: llama.LlamaConfig, checkpoint: Checkpoint
) -> tuple[llama.LlamaConfig, AdaptedCheckpoint]:
    """Rename tensors."""
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(
    llama.MODEL, config=config, weights=gpt2.weights, embed=gpt2.embed,
    layer=layer_norm.layer, head=layer_norm.head, adapt=adapt,
)  # fmt: skip
