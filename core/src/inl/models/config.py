"""Reads fields of a Hugging Face config with errors that name field and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inl.errors import CheckpointError
from inl.ops.rope import RopeScaling


def whole(hf: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer field."""
    value = hf.get(name, default)
    if value is None:
        raise CheckpointError(f"config field {name!r} is missing; expected an integer")
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(
            f"config field {name!r}: found {value!r}, expected an integer of 1 or more"
        )
    return value


def number(hf: Mapping[str, Any], name: str, default: float) -> float:
    """A positive number field."""
    value = hf.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise CheckpointError(
            f"config field {name!r}: found {value!r}, expected a number above 0"
        )
    return float(value)


def flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false."""
    value = hf.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"config field {name!r}: found {value!r}, expected true or false"
        )
    return value


def one_of(hf: Mapping[str, Any], name: str, choices: Mapping[str, str]) -> str:
    """A field with named choices, the first being the default; gives its meaning."""
    value = hf.get(name) or next(iter(choices))
    if not isinstance(value, str) or value not in choices:
        raise CheckpointError(
            f"config field {name!r}: found {value!r}, accepted: {', '.join(choices)}"
        )
    return choices[value]


def rope_scaling(hf: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Base frequency and scaling, from the fields of old and new config files."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(
            f"config field 'rope_scaling': found {rope!r}, expected an object"
        )
    theta = number(rope, "rope_theta", number(hf, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", number(rope, "factor", 1.0))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            number(rope, "factor", 8.0),
            number(rope, "low_freq_factor", 1.0),
            number(rope, "high_freq_factor", 4.0),
            whole(rope, "original_max_position_embeddings", 8192),
        )
    raise CheckpointError(
        f"config field 'rope_scaling.rope_type': found {kind!r}, "
        "accepted: default, linear, llama3"
    )
