"""Counts of a config, compared with the tensors of the files before planning weights.

A plan has objects for every layer and every expert, so a count that the files do not
bear out would take memory and time without limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inl.errors import CheckpointError

LAYERS: Final = ("num_hidden_layers", "n_layer")
EXPERTS: Final = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
)  # fmt: skip
MAX_LAYERS: Final = 4096
"""Limit of the layers; the deepest models have about 200."""
MAX_EXPERTS: Final = 1 << 15
"""Limit of the experts of all layers."""


def check_counts(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Raise :class:`CheckpointError` for more layers or experts than there can be.

    tensors: number of tensors in the files; every layer has at least one. Values of a
    wrong type are left to the model's own checks.
    """
    name = max(LAYERS, key=lambda each: _count(config, each))
    layers = _count(config, name)
    most = min(tensors, MAX_LAYERS)
    if layers > most:
        raise CheckpointError(
            f"{where}: config field {name!r}: found {layers}, but the files have "
            f"{tensors} tensors; accepted: up to {most}"
        )
    for name in EXPERTS:
        experts = _count(config, name)
        if layers * experts > MAX_EXPERTS:
            raise CheckpointError(
                f"{where}: config field {name!r}: found {experts} in each of {layers} "
                f"layers; accepted: up to {MAX_EXPERTS} in all layers"
            )


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if type(value) is int and value > 0 else 1
