"""The config of a model as the metadata of a GGUF file: the inverse of what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.gguf.config import GATING, SIGMOID, YARN_LOG
from inl.checkpoints.gguf.names import FAMILIES, MOE_FAMILIES, Family
from inl.checkpoints.gguf.rope import LONG_FACTORS, ROPE_FACTORS
from inl.errors import CheckpointError
from inl.models.rope import rope_fields
from inl.ops.rope import RopeScaling, frequencies

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.executor.model_loader import LanguageModel

RECURRENT: Final = (
    "qwen35", "qwen3next", "qwen35moe", "granitehybrid", "falcon-h1", "nemotron_h",
    "nemotron_h_moe",
)  # fmt: skip
"""Architectures whose tensors are in another order in GGUF files."""
READ_ONLY: Final = ("gemma4", "exaone-moe", "apertus")
"""Architectures that are read, but not written."""
SUPPORTED: Final = {
    family.model_type: (name, family)
    # Of several names of a family, files are written with the first one.
    for families in (MOE_FAMILIES, FAMILIES)
    for name, family in reversed(families.items())
    if name not in (*RECURRENT, *READ_ONLY)
} | {"mistral": ("llama", FAMILIES["llama"])}
"""``general.architecture`` and conventions by ``model_type``."""
BLOCKS_VERSION: Final = 2
"""Version of ggml's block formats."""
TOLERANCE: Final = 1e-6
"""Relative difference of numbers, which GGUF files store in float32."""
WINDOWED: Final = ("gemma2", "gemma3", "exaone4", "gpt-oss")
"""Architectures whose layers may have a window of one size."""
PERIODS: Final = {"gemma3": 6, "exaone4": 4}
"""Default period of layers without a window, where files may state others."""
NOT_COMPARED: Final = ("dtype", "tied")


def gguf_family(language: LanguageModel) -> tuple[str, Family]:
    """Return the architecture of a model's GGUF file.

    Raises :class:`CheckpointError` for a family that is not written.
    """
    kind = language.checkpoint.config.get("model_type")
    if kind not in SUPPORTED:
        raise CheckpointError(
            f"{language.checkpoint.path}: config field 'model_type': found {kind!r}, "
            f"which is not written as GGUF; accepted: {', '.join(sorted(SUPPORTED))}"
        )
    return SUPPORTED[kind]


def metadata(language: LanguageModel, name: str) -> dict[str, Any]:
    """Return the sizes and constants of a model; ``name`` is the architecture."""
    c, hf = language.config, language.checkpoint.config
    values: dict[str, Any] = {
        "block_count": c.layers,
        "context_length": int(hf.get("max_position_embeddings", c.max_tokens)),
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.norm_eps),
        "rope.freq_base": float(c.rope_theta),
        "rope.dimension_count": c.rope_scaling.rotary_dim or c.head_dim,
        "vocab_size": c.vocab_size,
        **_scaling(c.rope_scaling),
        **_family_fields(c, hf, name),
    }
    return {
        "general.architecture": name,
        "general.type": "model",
        "general.name": language.name,
        "general.quantization_version": BLOCKS_VERSION,
        **{f"{name}.{key}": value for key, value in values.items()},
    }


def rope_tensors(language: LanguageModel) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of frequency divisors; empty without such a scaling."""
    c = language.config
    scaling: RopeScaling = c.rope_scaling
    if scaling.kind == "llama3":
        plain = frequencies(c.head_dim, c.rope_theta, RopeScaling())
        divisors = plain / frequencies(c.head_dim, c.rope_theta, scaling)
        return {ROPE_FACTORS: divisors.astype(np.float32)}
    if scaling.kind == "divided":
        found = {"short_factor": scaling.divisors}
        if c.longer is not None:
            found["long_factor"] = c.longer[1].divisors
        return {
            LONG_FACTORS[name]: np.array(divisors, np.float32)
            for name, divisors in found.items()
        }
    return {}


def check_same(language: LanguageModel, written: LanguageModel) -> None:
    """Raise :class:`CheckpointError` if a file's fields differ from the config.

    What a GGUF file cannot say, such as a window of a family without windows, is
    refused so.
    """
    for field, found, expected in _differences(language.config, written.config):
        raise CheckpointError(
            f"{language.checkpoint.path}: {field} of the model: found {expected!r:.200}"
            f", which a GGUF file of {language.checkpoint.config.get('model_type')} "
            f"cannot say; accepted: {found!r:.200}"
        )


def _differences(ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """Return name, written and original value of each field that differs."""
    names = {field.name: field for config in (ours, theirs) for field in fields(config)}
    pairs = [
        (name, _get(theirs, name, field), _get(ours, name, field))
        for name, field in names.items()
        if name not in NOT_COMPARED
    ]
    return [pair for pair in pairs if not _equal(pair[1], pair[2])]


def _get(config: Any, name: str, field: Any) -> Any:
    default = None if field.default is MISSING else field.default
    return getattr(config, name, default)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        same = len(one) == len(other)
        return same and all(map(_equal, one, other))
    if type(one) in (int, float) and type(other) in (int, float):
        return bool(abs(one - other) <= TOLERANCE * max(abs(one), abs(other)))
    return bool(one == other)


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {
        "rope.scaling.type": scaling.kind,
        "rope.scaling.factor": float(scaling.factor),
    }
    if scaling.kind == "yarn":
        found |= {
            "rope.scaling.original_context_length": scaling.original,
            "rope.scaling.yarn_beta_fast": float(scaling.high),
            "rope.scaling.yarn_beta_slow": float(scaling.low),
        }
    return found


def _family_fields(c: Any, hf: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sizes = {view.window for view in c.views} - {None}
    if name == "phi3":
        found["attention.sliding_window"] = max(sizes, default=0)
        original = hf.get("original_max_position_embeddings")
        if c.rope_scaling.kind == "divided":
            original = hf.get("original_max_position_embeddings", c.max_tokens)
        if original:
            found["rope.scaling.original_context_length"] = int(original)
    if name in WINDOWED and (sizes or name != "exaone4"):
        if len(sizes) != 1:
            raise CheckpointError(
                f"config field 'sliding_window': found windows {sorted(sizes)}; "
                "accepted: layers with a window of one size"
            )
        found["attention.sliding_window"] = sizes.pop()
    if name in ("gemma2", "gemma3"):
        if c.attention_cap:
            found["attn_logit_softcapping"] = float(c.attention_cap)
        if c.logit_cap:
            found["final_logit_softcapping"] = float(c.logit_cap)
    if name == "gemma3":
        found["rope.freq_base_swa"] = float(c.local_rope[0])
    if name in PERIODS:
        windowed = np.array([view.window is not None for view in c.views])
        regular = (np.arange(c.layers) + 1) % PERIODS[name] != 0
        if windowed.any() and not np.array_equal(windowed, regular):
            found["attention.sliding_window_pattern"] = windowed
    if name == "mistral3":
        found |= _growth(c, hf)
    if hasattr(c, "experts"):
        found["expert_count"] = c.experts
        found["expert_used_count"] = c.experts_per_token
        if name != "llama":
            found["expert_feed_forward_length"] = c.expert_size
    if getattr(c, "grouping", None) is not None:
        found |= _sigmoid(c)
    return found


def _growth(c: Any, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of queries that grow with positions, and of their scores."""
    found: dict[str, Any] = {}
    if c.gain:
        found["attention.temperature_scale"] = float(c.gain)
    gain = rope_fields(hf).get("mscale_all_dim")
    if c.rope_scaling.kind == "yarn" and gain:
        found[YARN_LOG] = float(gain)
    return found


def _sigmoid(c: Any) -> dict[str, Any]:
    """Fields of mixtures with sigmoid scores."""
    return {
        GATING: SIGMOID,
        "expert_shared_count": c.shared_size // c.expert_size,
        "leading_dense_block_count": len(c.dense_layers),
        "expert_weights_scale": float(c.routed_scale),
        "expert_weights_norm": bool(c.renormalize),
        "expert_group_count": c.grouping.groups,
        "expert_group_used_count": c.grouping.chosen,
    }
