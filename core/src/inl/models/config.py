"""Reads fields of a Hugging Face config with errors that name field and value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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


def refuse_unless(hf: Mapping[str, Any], name: str, accepted: Any) -> None:
    """Raise :class:`CheckpointError` for a field of another value; absent is fine."""
    found = hf.get(name)
    if found is not None and found != accepted:
        raise CheckpointError(
            f"config field {name!r}: found {json.dumps(found, default=repr):.80}, "
            f"accepted: {json.dumps(accepted)}"
        )


def cap(hf: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """A bound of logits, above 0; ``null`` is none."""
    found = hf.get(name, default)
    return None if found is None else number({name: found}, name, 1.0)


def rope_scaling(hf: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Base frequency and scaling of all of a head's lanes.

    Raises :class:`CheckpointError` naming the field, for a kind that is not known and
    for heads that rotate in part.
    """
    rope = rope_fields(hf)
    if number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "config field 'partial_rotary_factor': "
            f"found {rope['partial_rotary_factor']!r}, accepted: 1.0"
        )
    theta = number(rope, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"config field 'rope_scaling.rope_type': found {kind!r:.80}, "
            f"accepted: {', '.join(KINDS)}"
        )
    return theta, KINDS[kind](rope, hf)


def rope_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, or ``rope_scaling`` with what lies beside it."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(
            f"config field 'rope_scaling': found {rope!r:.80}, expected an object"
        )
    names = "rope_theta", "partial_rotary_factor"
    beside = {name: hf[name] for name in names if hf.get(name) is not None}
    return {**beside, **rope}


def original(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Tokens of the context trained on."""
    name = "original_max_position_embeddings"
    if hf.get(name) is not None:
        return whole(hf, name)
    return whole(rope, name, hf.get("max_position_embeddings"))


def _plain(_rope: Mapping[str, Any], _hf: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling()


def _linear(rope: Mapping[str, Any], _hf: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling("linear", number(rope, "factor", 1.0))


def _llama3(rope: Mapping[str, Any], _hf: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        "llama3",
        number(rope, "factor", 8.0),
        number(rope, "low_freq_factor", 1.0),
        number(rope, "high_freq_factor", 4.0),
        whole(rope, "original_max_position_embeddings", 8192),
    )


def _yarn(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RopeScaling:
    """YaRN; its variants of other models (DeepSeek's, gpt-oss's) are refused."""
    for name in ("mscale", "mscale_all_dim"):
        refuse_unless(rope, name, None)
    refuse_unless(rope, "truncate", True)
    size = original(rope, hf)
    longer = whole(hf, "max_position_embeddings", size) / size
    factor = number(rope, "factor", longer)
    usual = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
    low, high = number(rope, "beta_slow", 1.0), number(rope, "beta_fast", 32.0)
    gain = number(rope, "attention_factor", usual)
    return RopeScaling("yarn", factor, low, high, size, gain=gain)


KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], RopeScaling]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Accepted values of ``rope_type``, and how each is read."""
