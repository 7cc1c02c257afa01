"""The metadata of a GGUF file as a Hugging Face ``config.json`` would have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inl.errors import CheckpointError
from inl.weights.files import Entry, show
from inl.weights.gguf_names import architecture, family

GEMMA3_PATTERN: Final = 6
"""Of so many layers the last one sees everything, the others a window."""

GEMMA3_27B_LAYERS: Final = 62


class _Fields:
    """Metadata of one architecture, with checked types."""

    def __init__(self, metadata: Mapping[str, Any], name: str, where: Path) -> None:
        self.metadata, self.name, self.where = metadata, name, where

    def integer(self, key: str, default: int | None = None) -> int:
        found = self._get(key, default)
        if type(found) is not int or not 0 < found < 1 << 31:
            self._refuse(key, found, "an integer from 1 to 2147483647")
        return int(found)

    def number(self, key: str, default: float | None = None) -> float:
        found = self._get(key, default)
        if type(found) not in (int, float) or not 0 < found < float("inf"):
            self._refuse(key, found, "a finite number above 0")
        return float(found)

    def _get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self.name}.{key}", default)

    def _refuse(self, key: str, found: Any, accepted: str) -> None:
        shown = "nothing" if found is None else show(found)
        raise CheckpointError(
            f"{self.where}: {self.name}.{key}: found {shown}; accepted: {accepted}"
        )


def config(
    metadata: Mapping[str, Any], tensors: Mapping[str, Entry], where: Path
) -> dict[str, Any]:
    """Write the metadata as a Hugging Face ``config.json`` would.

    An architecture without a name map gets ``architectures: []``. Raises
    :class:`CheckpointError` that names a missing or mistyped field.
    """
    name = architecture(metadata, where)
    known = family(metadata, name)
    ids = special_ids(metadata, where)
    if known is None:
        return {"model_type": name, "architectures": [], **ids}
    field = _Fields(metadata, name, where)
    found = {
        "model_type": known.model_type,
        "architectures": [known.architecture],
        **_sizes(field),
        "rope_theta": field.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(field),
        "rms_norm_eps": field.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": field.integer("vocab_size", len(vocabulary(metadata, where))),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
        **ids,
    }
    return found | (_gemma3(field, found) if name == "gemma3" else {})


def _sizes(field: _Fields) -> dict[str, Any]:
    heads = field.integer("attention.head_count")
    hidden = field.integer("embedding_length")
    head_dim = field.integer("attention.key_length", max(1, hidden // heads))
    rotated = field.integer("rope.dimension_count", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": field.integer("feed_forward_length"),
        "num_hidden_layers": field.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": rotated / head_dim,
        "max_position_embeddings": field.integer("context_length"),
    }


def _gemma3(field: _Fields, found: Mapping[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has; its files leave out what all of its sizes share."""
    layers, head_dim = found["num_hidden_layers"], found["head_dim"]
    if layers == GEMMA3_27B_LAYERS:  # the only size whose scale is not a head's
        head_dim = found["hidden_size"] // found["num_attention_heads"]
    sliding, full = "sliding_attention", "full_attention"
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        "sliding_window": field.integer("attention.sliding_window"),
        "layer_types": [
            sliding if (index + 1) % GEMMA3_PATTERN else full for index in range(layers)
        ],
        "rope_local_base_freq": field.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _rope_scaling(field: _Fields) -> dict[str, Any] | None:
    kind = field.metadata.get(f"{field.name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": field.number("rope.scaling.factor", 1.0)}
    if f"{field.name}.rope.scaling.original_context_length" in field.metadata:
        scaling["original_max_position_embeddings"] = field.integer(
            "rope.scaling.original_context_length"
        )
    return scaling


def vocabulary(metadata: Mapping[str, Any], where: Path) -> list[str]:
    """Return ``tokenizer.ggml.tokens``; empty where the file has none."""
    found = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.tokens: found {show(found)}; accepted: strings"
        )
    return found


def special_ids(metadata: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return ``bos_token_id`` and ``eos_token_id``, the latter with end-of-turn ids."""
    size = len(vocabulary(metadata, where))
    found: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata:
            continue
        value = metadata[key]
        if type(value) is not int or not 0 <= value < size:
            raise CheckpointError(
                f"{where}: {key}: found {show(value)}; "
                f"accepted: an id below {size}, the number of tokens"
            )
        found[name] = value
    ends = [found[name] for name in ("eos", "eot", "eom") if name in found]
    return {"bos_token_id": found.get("bos"), "eos_token_id": sorted(set(ends))}
