"""The causal language model of a checkpoint: of images and text, or without a prefix.

A model of images and text has the config of its language model in ``text_config``, and
the tensors of that model under a prefix of their own. A model that was saved without
its head has no prefix ``model.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError

TEXT: Final = "text_config"
PREFIXES: Final = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Prefixes of the language model's tensors in a model of images and text."""
OWN: Final = {"model.": "model.", "lm_head.": "lm_head."}
"""Prefixes where no tensor has a prefix of ``PREFIXES`` with "language_model"."""
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 30, "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16,
        "tie_word_embeddings": False,
    },
    "llama4": {"model_type": "llama4_text", "tie_word_embeddings": False},
    "paddleocr_vl": {
        "model_type": "paddleocr_vl_text", "vocab_size": 103424, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
    },
    "mistral3": {"model_type": "mistral"}, "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"}, "qwen2_vl": {}, "qwen2_5_vl": {},
    "qwen3_vl": {}, "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "gemma3n": {
        "model_type": "gemma3n_text", "vocab_size": 262400, "hidden_size": 2048,
        "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text", "vocab_size": 262144, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    "fuyu": {"model_type": "persimmon"}, "got_ocr2": {"model_type": "qwen2"},
    "internvl": {"model_type": "qwen2"}, "lfm2_vl": {"model_type": "lfm2"},
    "llava_onevision": {"model_type": "qwen2"}, "ovis2": {"model_type": "qwen2"},
    "vipllava": {"model_type": "llama"}, "qwen3_vl_moe": {"norm_topk_prob": True},
}  # fmt: skip
"""Models of images and text by ``model_type``, and defaults of their language model.

Without a default, a model is tied if its files have no head.
"""
OF_TEXT: Final = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
"""Language models that rotate by positions along three axes, and those that they are
otherwise."""
FLAT_KINDS: Final = (*OF_TEXT, "paddleocr_vl")
"""Models whose fields may all be beside those of images."""
ROTATIONS: Final = ("rope_scaling", "rope_parameters")
DEEPSTACK: Final = "deepstack_visual_indexes"
"""Field of a vision encoder with layers whose features the first layers of the language
model add."""
FLAT: Final = re.compile("(vision|image|video)_")
"""Beginning of a field of images where the language model's are beside it."""
SHARED: Final = ("quantization_config", "architectures", "eos_token_id")
"""Fields of the whole model that its language model takes."""
TABLE: Final = "embed_tokens.weight"
TIED: Final = "tie_word_embeddings"


def causal(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of the language model alone, with the usual names.

    Raises :class:`~inl.errors.CheckpointError` for a ``text_config`` that is no object.
    """
    config, names = checkpoint.config, checkpoint.names()
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in DEFAULTS:
        nested = any(
            "language_model." in name or "text_model." in name for name in names
        )
        prefixes = PREFIXES if nested else OWN
        renamed = {name: _text_name(name, prefixes) for name in names}
        tied = not any(new and new.startswith("lm_head.") for new in renamed.values())
        return _renamed(checkpoint, renamed, _text_config(config, kind, tied=tied))
    if TABLE in names and f"model.{TABLE}" not in names:
        heads = {name: name.startswith("lm_head.") for name in names}
        renamed = {
            name: name if own else f"model.{name}" for name, own in heads.items()
        }
        return _renamed(checkpoint, renamed, config)
    return checkpoint


def _renamed(
    checkpoint: Checkpoint, names: Mapping[str, str | None], config: Mapping[str, Any]
) -> Checkpoint:
    pieces = {
        new: Piece((name,), checkpoint.spec(name)[1])
        for name, new in names.items()
        if new is not None
    }
    return AdaptedCheckpoint(checkpoint, pieces, config=config)


def _text_name(name: str, prefixes: Mapping[str, str]) -> str | None:
    """Return the usual name of a tensor, ``None`` if it is not the language model's."""
    for prefix, usual in prefixes.items():
        if name.startswith(prefix):
            return usual + name.removeprefix(prefix)
    return None


def _text_config(
    config: Mapping[str, Any], kind: str, *, tied: bool
) -> Mapping[str, Any]:
    text = config.get(TEXT) or {}
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"config field {TEXT!r}: found {show(text)}, expected an object"
        )
    if kind in FLAT_KINDS and not text:
        text = {name: config[name] for name in config if not FLAT.match(name)}
    shared = {name: config[name] for name in SHARED if name in config}
    fields = {**DEFAULTS[kind], **text, **shared}
    own = fields.get("model_type", kind)
    if own == "paddleocr_vl":  # beside those of images
        own = fields["model_type"] = "paddleocr_vl_text"
    if own == "paddleocr_vl_text":
        fields |= {name: _of_axes(fields[name]) for name in ROTATIONS if name in fields}
    if isinstance(own, str) and own in OF_TEXT:
        fields |= {name: _of_axes(fields[name]) for name in ROTATIONS if name in fields}
        fields["model_type"] = OF_TEXT[own]
    vision = config.get("vision_config")
    if isinstance(vision, Mapping) and DEEPSTACK in vision:
        fields[DEEPSTACK] = vision[DEEPSTACK]
    if TIED in DEFAULTS[kind]:
        tied = config.get(TIED, DEFAULTS[kind][TIED])
    return {**fields, TIED: tied}


def _of_axes(rotation: Any) -> Any:
    """Return a rotation by positions along axes, whose frequencies are the usual."""
    if not isinstance(rotation, Mapping):
        return rotation
    kinds = {name: rotation[name] for name in ("type", "rope_type") if name in rotation}
    return {**rotation} | {
        name: "default" for name, kind in kinds.items() if kind == "mrope"
    }
