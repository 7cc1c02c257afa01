"""adapter_config.json of PEFT: only plain LoRA is accepted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError

ACCEPTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values of fields that have an effect here or at their other values."""

READ: Final = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")

WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
        "layers_pattern", "layers_to_transform", "lora_dropout", "peft_version",
        "revision", "runtime_config", "target_modules", "task_type",
        "qalora_group_size", "loftq_config", "eva_config", "corda_config",
        "megatron_core", "ensure_weight_tying",
    }
)  # fmt: skip
"""Fields used in training only, and those that follow from the tensors' names."""

REASONS: Final[Mapping[str, str]] = {
    "use_dora": "DoRA also changes the lengths of the base model's rows",
    "modules_to_save": "they replace whole matrices of the base model",
    "target_parameters": "adapters of parameters, such as stacked experts, are not "
    "computed",
    "trainable_token_indices": "they replace rows of the embedding",
}
"""Why some fields are refused, by name."""

MERGE: Final = (
    "or merge the adapter into its base model, with merge_and_unload() of peft, and "
    "serve the merged model"
)
"""What to do with an adapter that is refused."""

PLAIN_KEY: Final = re.compile(r"[\w.]+")
"""Keys of patterns that are read; PEFT takes any regular expression."""


class AdapterConfig:
    """The fields of adapter_config.json that are used.

    path: of the file, for errors. Raises :class:`~inl.errors.CheckpointError` for a
    field that is damaged, or would change the result in another way.
    """

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self._fields, self._path = fields, path
        for name, accepted in ACCEPTED.items():
            value = fields.get(name, accepted[0])
            if not any(value is each or value == each for each in accepted):
                listed = " or ".join(map(str, accepted))
                raise self._error(name, value, f"{listed}; {MERGE}")
        for name, value in fields.items():
            if name not in (*ACCEPTED, *READ, *WITHOUT_EFFECT) and value:
                absent = f"no such field, null or false; {MERGE}"
                raise self._error(name, value, absent)
        self._rank = self._number("r", int)
        self._alpha = self._number("lora_alpha", int | float)
        self._ranks = self._pattern("rank_pattern", int)
        self._alphas = self._pattern("alpha_pattern", int | float)
        self._rs = fields.get("use_rslora") or False
        if not isinstance(self._rs, bool):
            raise self._error("use_rslora", self._rs, "true or false")

    def rank(self, module: str) -> int:
        """Return the rank of a module."""
        return int(_matching(self._ranks, module, self._rank))

    @property
    def highest_rank(self) -> int:
        """The highest rank of any module."""
        return int(max(self._rank, *self._ranks.values(), 1))

    def scale(self, module: str) -> float:
        """Return the factor on ``B A``: alpha / r, or alpha / sqrt(r)."""
        rank = self.rank(module)
        alpha = float(_matching(self._alphas, module, self._alpha))
        return alpha / (rank**0.5 if self._rs else rank)

    def _number(self, name: str, kind: Any) -> Any:
        value = self._fields.get(name)
        if not _is_positive(value, kind):
            raise self._error(name, value, "a number above 0")
        return value

    def _pattern(self, name: str, kind: Any) -> dict[str, Any]:
        pattern = self._fields.get(name) or {}
        if not isinstance(pattern, dict) or not all(
            PLAIN_KEY.fullmatch(key) and _is_positive(value, kind)
            for key, value in pattern.items()
        ):
            accepted = "an object of module names, without wildcards, and numbers"
            raise self._error(name, pattern, accepted)
        return pattern

    def _error(self, name: str, value: object, accepted: str) -> CheckpointError:
        reason = f" ({REASONS[name]})" if name in REASONS else ""
        return CheckpointError(
            f"{self._path}: {name}: found {show(value)}{reason}; accepted: {accepted}"
        )


def _is_positive(value: object, kind: Any) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    return bool(0 < value < 2**31)


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that is the end of a module's name."""
    for key, value in pattern.items():
        if f".{module}".endswith(f".{key}"):
            return value
    return default
