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
    "dots1": "n_routed_experts", "granitemoehybrid": "num_local_experts",
    "nemotron_h": "n_routed_experts",
}  # fmt: skip
"""Config field with the number of experts, by ``model_type``; else ``num_experts``."""
WHOLE_EXPERTS: Final = (
    "mixtral", "minimax_m2", "gpt_oss", "olmoe", "granitemoehybrid"
)  # fmt: skip
"""Families whose experts have the width of a config's ``intermediate_size``."""

BY_KIND: Final = ("gemma4",)
"""Architectures whose kinds of layers differ in heads and widths."""
KEY_HEADS: Final = "attention.head_count_kv"
SHARED_SIZE: Final = "expert_shared_feed_forward_length"

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

    @property
    def has_experts(self) -> bool:
        """Whether the number of experts is stated and not 0."""
        return bool(self._get("expert_count", 0) != 0)

    def stores(self, name: str) -> bool:
        """Whether any layer has a tensor of this name."""
        return any(
            each.startswith("blk.") and each.endswith(f".{name}")
            for each in self.tensors
        )

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
    if known in MOE_FAMILIES.values() and field.has_experts:
        fields |= _experts(field, known.model_type, fields["intermediate_size"])
    return fields | (EXTRAS[name](field, fields) if name in EXTRAS else {})


def _sizes(field: _Fields) -> dict[str, Any]:
    heads = field.integer("attention.head_count")
    hidden = field.integer("embedding_length")
    head_dim = field.integer("attention.key_length", max(1, hidden // heads))
    rotated = field.integer("rope.dimension_count", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": _inner_size(field),
        "num_hidden_layers": field.integer("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(field, heads),
        "head_dim": head_dim,
        "partial_rotary_factor": rotated / head_dim,
        "max_position_embeddings": field.integer("context_length"),
    }


def _inner_size(field: _Fields) -> int:
    """Return the width of feed-forward layers: one number, or one a layer with 0s."""
    key = "feed_forward_length"
    found = field.metadata.get(f"{field.name}.{key}")
    if not isinstance(found, np.ndarray):
        # Files of Qwen3.5-MoE, which has no dense layers, state that of experts.
        experts = field.metadata.get(f"{field.name}.expert_feed_forward_length")
        return field.integer(key, experts)
    counts = sorted(set(_by_layer(field, key)) - {0})
    if len(counts) > 1 and field.name not in BY_KIND:
        field.refuse(key, counts, "the same number in all layers that have one")
    return counts[0] if counts else 1


def _key_heads(field: _Fields, heads: int) -> int:
    """Return the heads of keys: one number, or one a layer, 0 where it has no cache."""
    if not isinstance(field.metadata.get(f"{field.name}.{KEY_HEADS}"), np.ndarray):
        return field.integer(KEY_HEADS, heads)
    counts = _layer_heads(field)
    found = sorted(set(counts) - {0})
    if len(found) != 1 and (field.name not in BY_KIND or not found):
        field.refuse(KEY_HEADS, counts, "the same number in all layers with a cache")
    return found[0]


def _layer_heads(field: _Fields) -> list[int]:
    """Return the heads of keys of each layer."""
    return _by_layer(field, KEY_HEADS)


def _by_layer(field: _Fields, key: str) -> list[int]:
    """Return a number for each layer, of which the file has one or one a layer."""
    layers = field.integer("block_count", most=MAX_LAYERS)
    value = np.asarray(field.metadata.get(f"{field.name}.{key}", 1))
    if value.ndim == 0:
        return [int(value)] * layers
    if value.ndim != 1 or len(value) != layers or value.dtype.kind not in "iu":
        field.refuse(key, value.tolist(), "one integer, or one a layer")
    counts = [int(count) for count in value]
    if min(counts) < 0:
        field.refuse(key, counts, "0 or more")
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


def _gemma4(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Gemma 4: sizes of layers with a window are apart from the others'."""
    layers = fields["num_hidden_layers"]
    has_window = _flags(field, "attention.sliding_window_pattern", layers)
    heads = _layer_heads(field)
    kinds = {kind: heads[has_window.index(kind)] for kind in {*has_window}}
    widths = sorted({*_by_layer(field, "feed_forward_length")})
    shared = field.metadata.get(f"{field.name}.attention.shared_kv_layers", 0)
    final = "final_logit_softcapping"
    full = [index for index, local in enumerate(has_window) if not local]
    lanes = "embedding_length_per_layer_input"
    table = field.tensors.get("per_layer_token_embd.weight")
    found: dict[str, Any] = {
        "layer_types": [
            ("full_attention", "sliding_attention")[local] for local in has_window
        ],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": field.integer("attention.sliding_window"),
        "head_dim": field.integer("attention.key_length_swa", fields["head_dim"]),
        "global_head_dim": fields["head_dim"],
        "num_key_value_heads": kinds.get(True, heads[0]),
        "num_global_key_value_heads": kinds.get(False),
        "attention_k_eq_v": bool(full)
        and f"blk.{full[0]}.attn_v.weight" not in field.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(widths) > 1,
        "hidden_size_per_layer_input": field.metadata.get(f"{field.name}.{lanes}", 0),
        final: field.number(final) if field.has(final) else None,
        # Not in files: the models without embeddings of layers see images wholly.
        "use_bidirectional_attention": None if table is not None else "vision",
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "rope_theta": fields["rope_theta"],
                "partial_rotary_factor": 1.0,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": field.number("rope.freq_base_swa", 10000.0),
            },
        },
    }  # fmt: skip
    if len(widths) > 1 and widths != [widths[0], 2 * widths[0]]:
        field.refuse("feed_forward_length", widths, "a width, or also twice as much")
    if any(heads[i] != kinds[local] for i, local in enumerate(has_window)):
        field.refuse(KEY_HEADS, heads, "the same number in layers of one kind")
    if table is not None:
        found["vocab_size_per_layer_input"] = table.shape[0]
    if field.has_experts:
        found["enable_moe_block"] = True
        found["top_k_experts"] = fields["num_experts_per_tok"]
    return found


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
    if field.has(SHARED_SIZE):
        found["shared_expert_intermediate_size"] = field.integer(SHARED_SIZE)
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


def _exaone_moe(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of K-EXAONE: the windows of EXAONE 4.0, and sigmoid scores of experts."""
    found = _sigmoid(field, fields)
    layers = {"num_hidden_layers": found["num_hidden_layers"]}
    shared = found.pop("n_shared_experts")
    return {**found, **_exaone4(field, {**fields, **layers}),
            "num_shared_experts": shared}  # fmt: skip


def _apertus(field: _Fields, _fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "xielu"} if "xielu.alpha_p" in field.metadata else {}


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


def _mamba(field: _Fields) -> dict[str, Any]:
    """Fields of layers of Mamba-2, by the names of Bamba."""
    heads, inner = field.integer("ssm.time_step_rank"), field.integer("ssm.inner_size")
    if inner % heads:
        field.refuse("ssm.inner_size", inner, f"a multiple of {heads}, the heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": field.integer("ssm.group_count"),
        "mamba_d_state": field.integer("ssm.state_size"),
        "mamba_d_conv": field.integer("ssm.conv_kernel"),
        "mamba_conv_bias": field.stores("ssm_conv1d.bias"),
    }


def _expanded(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Mamba-2 whose values are a multiple of the hidden lanes."""
    found, hidden = _mamba(field), fields["hidden_size"]
    inner = found["mamba_n_heads"] * found["mamba_d_head"]
    if inner % hidden:
        field.refuse("ssm.inner_size", inner, f"a multiple of {hidden} hidden lanes")
    return {**found, "mamba_expand": inner // hidden}


def _granite_hybrid(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Granite 4, and of Bamba, whose files have the same architecture."""
    counts = _layer_heads(field)
    found = _expanded(field, fields)
    if fields["model_type"] == "bamba":
        listed = [index for index, count in enumerate(counts) if count]
        return {**found, "attn_layer_indices": listed}
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    inner = field.integer(SHARED_SIZE, fields["intermediate_size"])
    return {
        **found,
        **{name: field.number(key, 1.0) for name, key in scales.items()},
        "layer_types": [("mamba", "attention")[count > 0] for count in counts],
        "position_embedding_type": "nope",
        "num_local_experts": fields.get("num_local_experts", 0),
        "shared_intermediate_size": inner,
    }


def _falcon_h1(field: _Fields, _fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Falcon-H1, whose constant factors are in the weights of the file."""
    return {
        **_mamba(field),
        "mamba_d_ssm": field.integer("ssm.inner_size"),
        "mamba_rms_norm": field.stores("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": field.stores("ssm_out.bias"),
    }


def _nemotron_h(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Nemotron-H: a layer has heads, or a width, or is recurrent."""
    layers, mamba = _model_layers(field, fields), _mamba(field)
    letter = "E" if field.has_experts else "-"
    widths = _by_layer(field, "feed_forward_length")
    pattern = "".join(
        "*" if heads else letter if width else "M"
        for heads, width in zip(_layer_heads(field), widths, strict=True)
    )
    found = {
        "hybrid_override_pattern": pattern[:layers],
        "num_hidden_layers": layers,
        "layer_norm_epsilon": fields["rms_norm_eps"],
        "mlp_hidden_act": "relu2",
        "mlp_bias": field.stores("ffn_up.bias"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
    }
    if letter == "-":
        return found
    latent = "moe_latent_size"
    return {
        **found,
        "moe_shared_expert_intermediate_size": field.integer(SHARED_SIZE),
        "n_group": field.integer("expert_group_count", 1),
        "topk_group": field.integer("expert_group_used_count", 1),
        "routed_scaling_factor": field.number("expert_weights_scale", 1.0),
        "norm_topk_prob": field.metadata.get(
            f"{field.name}.expert_weights_norm", False
        ),
        latent: field.integer(latent) if field.has(latent) else None,
    }


def _axes(field: _Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of models whose planes turn by positions along three axes."""
    key = "rope.dimension_sections"
    sizes = np.asarray(field.metadata.get(f"{field.name}.{key}", ()))
    if sizes.shape not in ((3,), (4,)) or sizes.dtype.kind not in "iu":
        field.refuse(key, sizes.tolist(), "three or four integers")
    scaling = {
        **(fields["rope_scaling"] or {"rope_type": "default"}),
        "mrope_section": [int(size) for size in sizes[:3]],
    }
    if field.name == "qwen2vl":
        return {"rope_scaling": scaling}
    deepstack = field.metadata.get(f"{field.name}.n_deepstack_layers", 0)
    if type(deepstack) is not int or not 0 <= deepstack <= fields["num_hidden_layers"]:
        field.refuse("n_deepstack_layers", deepstack, "a number of layers")
    if field.name == "paddleocr":
        return {"rope_scaling": scaling, **_ernie(field, fields)}
    return {
        "rope_scaling": {**scaling, "mrope_interleaved": True},
        "deepstack_visual_indexes": list(range(deepstack)),
    }


EXTRAS: Final[Mapping[str, Callable[[_Fields, Mapping[str, Any]], dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "qwen2vl": _axes,
    "qwen3vl": _axes,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "qwen3next": _delta,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "arcee": _arcee,
    "mistral3": _ministral3,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "paddleocr": _axes,
    "exaone4": _exaone4,
    "exaone-moe": _exaone_moe,
    "apertus": _apertus,
    "gemma": _gemma1,
    "glm4moe": _glm4_moe,
    "dots1": _dots1,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
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
