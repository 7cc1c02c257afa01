"""Conversion of GGUF metadata to the fields of a Hugging Face ``config.json``.

GGUF files omit fields that all sizes of a family share; their values are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from inl.checkpoints.counts import MAX_LAYERS
from inl.checkpoints.files.tensor_file import Entry, show
from inl.checkpoints.gguf.names import MOE_FAMILIES, architecture, family
from inl.checkpoints.gguf.special_tokens import special_ids, vocabulary
from inl.errors import CheckpointError

GEMMA3_PATTERN: Final = 6
"""Default period of layers with full attention; the others have a sliding window."""

GEMMA_27B_LAYERS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention scale is not that of ``head_dim``."""

LEAST, MOST = 1e-30, 1e30
"""Range of the numbers, in which float32 can compute with them."""

DRAFT_LAYERS: Final = "nextn_predict_layers"
"""Key of the number of last layers, which only propose drafts."""

SIGMOID: Final = 2
"""Number of sigmoid scores of experts in GGUF files."""
GATING: Final = "expert_gating_func"
YARN_LOG: Final = "rope.scaling.yarn_log_multiplier"

EXPERT_COUNTS: Final = {
    "mixtral": "num_local_experts", "minimax_m2": "num_local_experts",
    "gpt_oss": "num_local_experts", "glm4_moe": "n_routed_experts",
    "dots1": "n_routed_experts",
}  # fmt: skip
"""Config field with the number of experts, by ``model_type``; else ``num_experts``."""
WHOLE_EXPERTS: Final = ("mixtral", "minimax_m2", "gpt_oss", "olmoe")
"""Families whose experts have the width of a config's ``intermediate_size``."""

KEY_HEADS: Final = "attention.head_count_kv"

YARN: Final = (
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
)


class _Fields:
    """Accessor for the metadata of an architecture; raises for a wrong type."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        name: str,
        where: Path,
        tensors: Mapping[str, Entry],
    ) -> None:
        self.metadata, self.name, self.where = metadata, name, where
        self.tensors = tensors

    def integer(
        self, key: str, default: int | None = None, *, most: int = 2**31 - 1
    ) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 0 < value <= most:
            self.refuse(key, value, f"an integer from 1 to {most}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not LEAST <= value <= MOST:
            self.refuse(key, value, f"a number from {LEAST:g} to {MOST:g}")
        return float(value)

    def has(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.metadata

    def _get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self.name}.{key}", default)

    def refuse(self, key: str, found: Any, accepted: str) -> None:
        shown = "nothing" if found is None else show(found)
        raise CheckpointError(
            f"{self.where}: {self.name}.{key}: found {shown}; accepted: {accepted}"
        )


def config(
    metadata: Mapping[str, Any], tensors: Mapping[str, Entry], where: Path
) -> dict[str, Any]:
    """Return the metadata as the fields of a Hugging Face ``config.json``.

    An unknown architecture gets ``architectures: []``. Raises
    :class:`CheckpointError` that names a missing or mistyped field.
    """
    name = architecture(metadata, where)
    known = family(metadata, name)
    ids = special_ids(metadata, where)
    if known is None:
        return {"model_type": name, "architectures": [], **ids}
    field = _Fields(metadata, name, where, tensors)
    fields = {
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
    if known in MOE_FAMILIES.values():
        fields |= _experts(field, known.model_type, fields["intermediate_size"])
    return fields | (EXTRAS[name](field, fields) if name in EXTRAS else {})


def _sizes(field: _Fields) -> dict[str, Any]:
    heads = field.integer("attention.head_count")
    hidden = field.integer("embedding_length")
    head_dim = field.integer("attention.key_length", max(1, hidden // heads))
    rotated = field.integer("rope.dimension_count", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": field.integer(
            "feed_forward_length",
            # Files of Qwen3.5-MoE, which has no dense layers, state that of experts.
            field.metadata.get(f"{field.name}.expert_feed_forward_length"),
        ),
        "num_hidden_layers": field.integer("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(field, heads),
        "head_dim": head_dim,
        "partial_rotary_factor": rotated / head_dim,
        "max_position_embeddings": field.integer("context_length"),
    }


def _key_heads(field: _Fields, heads: int) -> int:
    """Return the heads of keys: one number, or one a layer, 0 where it has no cache."""
    if not isinstance(field.metadata.get(f"{field.name}.{KEY_HEADS}"), np.ndarray):
        return field.integer(KEY_HEADS, heads)
    counts = _layer_heads(field)
    found = sorted(set(counts) - {0})
    if len(found) != 1:
        field.refuse(KEY_HEADS, counts, "the same number in all layers with a cache")
    return found[0]


def _layer_heads(field: _Fields) -> list[int]:
    """Return the heads of keys of each layer."""
    layers = field.integer("block_count", most=MAX_LAYERS)
    value = np.asarray(field.metadata.get(f"{field.name}.{KEY_HEADS}", 1))
    if value.ndim == 0:
        return [int(value)] * layers
    if value.ndim != 1 or len(value) != layers or value.dtype.kind not in "iu":
        field.refuse(KEY_HEADS, value.tolist(), "one integer, or one a layer")
    counts = [int(count) for count in value]
    if min(counts) < 0:
        field.refuse(KEY_HEADS, counts, "0 or more")
    return counts


def _experts(field: _Fields, kind: str, inner: int) -> dict[str, Any]:
    """Fields of mixtures of experts; llama.cpp normalizes the routing weights."""
    count, used = field.integer("expert_count"), field.integer("expert_used_count")
    found = {
        EXPERT_COUNTS.get(kind, "num_experts"): count,
        "num_experts_per_tok": used,
    }
    if kind in WHOLE_EXPERTS:
        return found
    return found | {
        "moe_intermediate_size": field.integer(
            "expert_feed_forward_length", max(1, inner // used)
        ),
        "norm_topk_prob": True,
    }


def _gemma2(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = "sliding_attention", "full_attention"
    layers = range(fields["num_hidden_layers"])
    return {
        **_gemma(field, fields),
        "layer_types": [kinds[index % 2] for index in layers],
        "attn_logit_softcapping": field.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": field.number("final_logit_softcapping", 30.0),
    }


def _gemma3(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    sliding, full = "sliding_attention", "full_attention"
    layers = range(fields["num_hidden_layers"])
    final = "final_logit_softcapping"
    return {
        **_gemma(field, fields),
        "layer_types": [
            sliding if is_windowed else full
            for is_windowed in _windowed(field, GEMMA3_PATTERN, len(layers))
        ],
        "rope_local_base_freq": field.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        final: field.number(final) if field.has(final) else None,
    }


def _windowed(field: _Fields, default: int, layers: int) -> list[bool]:
    """Return whether each layer has a sliding window: by a period, or one bool each."""
    key = "attention.sliding_window_pattern"
    found = field.metadata.get(f"{field.name}.{key}")
    if found is None or type(found) is int:
        period = field.integer(key, default)
        return [(index + 1) % period != 0 for index in range(layers)]
    return _flags(field, key, layers)


def _flags(field: _Fields, key: str, layers: int) -> list[bool]:
    """Return the first ``layers`` bools of an array with one a layer, or more."""
    flags = np.asarray(field.metadata[f"{field.name}.{key}"])
    if flags.dtype != np.bool_ or flags.ndim != 1 or len(flags) < layers:
        field.refuse(key, flags.tolist(), "one bool a layer")
    return [bool(flag) for flag in flags[:layers]]


def _gemma(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = fields["head_dim"]
    if fields["num_hidden_layers"] == GEMMA_27B_LAYERS[field.name]:
        head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        "sliding_window": field.integer("attention.sliding_window"),
    }


def _phi3(field: _Fields, _fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Phi-3; a window of 0 means none."""
    key, original = "attention.sliding_window", "rope.scaling.original_context_length"
    windowed = field.metadata.get(f"{field.name}.{key}", 0) != 0
    extra = {"sliding_window": field.integer(key) if windowed else None}
    if field.has(original):
        extra["original_max_position_embeddings"] = field.integer(original)
    return extra


def _olmo2(field: _Fields, _fields: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse OLMo 3, which has sliding windows and the same architecture name."""
    key = f"{field.name}.attention.sliding_window"
    if key in field.metadata:
        raise CheckpointError(
            f"{field.where}: {key}: found {show(field.metadata[key])}; "
            "accepted: none, as in OLMo 2"
        )
    return {}


def _delta(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of models with recurrent layers, without the layers that draft."""
    layers = _model_layers(field, fields)
    values = field.integer("ssm.time_step_rank")
    inner = field.integer("ssm.inner_size")
    if inner % values:
        field.refuse("ssm.inner_size", inner, f"a multiple of {values}, the heads")
    found: dict[str, Any] = {
        "num_hidden_layers": layers,
        "linear_conv_kernel_dim": field.integer("ssm.conv_kernel"),
        "linear_num_key_heads": field.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": field.integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        # Only Qwen3.5 files have value heads of one key apart.
        "linear_heads_tiled": field.name != "qwen3next",
        "layer_types": _layer_types(field, layers),
    }
    shared = "expert_shared_feed_forward_length"
    if field.has(shared):
        found["shared_expert_intermediate_size"] = field.integer(shared)
    return found


def _model_layers(field: _Fields, fields: Mapping[str, Any]) -> int:
    """Return the number of layers without those that draft."""
    layers = int(fields["num_hidden_layers"])
    if field.metadata.get(f"{field.name}.{DRAFT_LAYERS}", 0) == 0:
        return layers
    return layers - field.integer(DRAFT_LAYERS, most=layers - 1)


def _layer_types(field: _Fields, layers: int) -> list[str]:
    kinds = "full_attention", "linear_attention"
    key = "attention.recurrent_layers"
    if not field.has(key):
        period = field.integer("full_attention_interval", 4)
        return [kinds[(index + 1) % period != 0] for index in range(layers)]
    return [kinds[flag] for flag in _flags(field, key, layers)]


def _sigmoid(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of mixtures with sigmoid scores and shared experts."""
    layers = _model_layers(field, fields)
    found = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": fields["num_hidden_layers"] - layers,
        "n_shared_experts": field.metadata.get(f"{field.name}.expert_shared_count", 0),
        "first_k_dense_replace": field.metadata.get(
            f"{field.name}.leading_dense_block_count", 0
        ),
        "n_group": field.integer("expert_group_count", 1),
        "topk_group": field.integer("expert_group_used_count", 1),
        "routed_scaling_factor": field.number("expert_weights_scale", 1.0),
        "norm_topk_prob": field.metadata.get(
            f"{field.name}.expert_weights_norm", False
        ),
    }
    kind = field.metadata.get(f"{field.name}.{GATING}", SIGMOID)
    if kind != SIGMOID:
        field.refuse(GATING, kind, f"{SIGMOID}, sigmoid scores")
    return found


def _glm4_moe(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_sigmoid(field, fields),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in field.tensors,
    }


def _dots1(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**_sigmoid(field, fields), "sliding_window": None}


def _arcee(_field: _Fields, _fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _gemma1(_field: _Fields, _fields: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")


def _seed_oss(field: _Fields, _fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in field.tensors}


def _ernie(_field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": fields["attention_bias"]}


def _exaone4(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EXAONE 4.0, whose small models have no windows."""
    key, layers = "attention.sliding_window", fields["num_hidden_layers"]
    if not field.has(key):
        return {"sliding_window": None}
    kinds = "full_attention", "sliding_attention"
    return {
        "sliding_window": field.integer(key),
        "layer_types": [kinds[has] for has in _windowed(field, 4, layers)],
    }


def _ministral3(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = {**(fields["rope_scaling"] or {}), "rope_theta": fields["rope_theta"]}
    rope.setdefault("rope_type", "default")
    if field.has(YARN_LOG):
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), field.number(YARN_LOG))
    if field.has("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = field.number("attention.temperature_scale")
    return {"rope_parameters": rope, "rope_scaling": None}


def _gpt_oss(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of GPT-OSS; the width of experts is that of the config."""
    rope = {**(fields["rope_scaling"] or {}), "rope_theta": fields["rope_theta"]}
    rope.setdefault("rope_type", "default")
    if rope["rope_type"] == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope, "truncate": False}
    return {
        "sliding_window": field.integer("attention.sliding_window"),
        "intermediate_size": field.integer(
            "expert_feed_forward_length", fields["intermediate_size"]
        ),
        "rope_parameters": rope,
        "rope_scaling": None,
    }


def _lfm2(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of LFM2: a layer without heads of keys is a convolution."""
    kinds = "conv", "full_attention"
    counts = _layer_heads(field)
    return {
        "layer_types": [kinds[count > 0] for count in counts],
        "conv_L_cache": field.integer("shortconv.l_cache"),
        "conv_bias": False,
        "norm_eps": fields["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = field.metadata.get(f"{field.name}.{GATING}", SIGMOID)
    if kind != SIGMOID:
        field.refuse(GATING, kind, f"{SIGMOID}, sigmoid scores")
    dense = field.metadata.get(f"{field.name}.leading_dense_block_count", 0)
    return {**_lfm2(field, fields), "num_dense_layers": dense}


EXTRAS: Final[Mapping[str, Callable[[_Fields, Mapping[str, Any]], dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "qwen3next": _delta,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "arcee": _arcee,
    "mistral3": _ministral3,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "gemma": _gemma1,
    "glm4moe": _glm4_moe,
    "dots1": _dots1,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
}
"""Functions for the fields that only one architecture has."""


def _rope_scaling(field: _Fields) -> dict[str, Any] | None:
    kind = field.metadata.get(f"{field.name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": field.number("rope.scaling.factor", 1.0)}
    if f"{field.name}.rope.scaling.original_context_length" in field.metadata:
        scaling["original_max_position_embeddings"] = field.integer(
            "rope.scaling.original_context_length"
        )
    for key, name in YARN:
        if field.has(key):
            scaling[name] = field.number(key)
    return scaling
