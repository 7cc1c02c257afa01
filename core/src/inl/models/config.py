"""Typed access to Hugging Face config fields, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from inl.errors import CheckpointError
from inl.ops.rope import RopeScaling
from inl.weights.files import show

LEAST, MOST = 1e-30, 1e30
"""Default range of numbers, in which float32 can compute with them."""
MAX_EPS = 1.0
"""Largest epsilon of a norm."""
MIN_CONTEXT = 2
"""Shortest context in tokens: one of the prompt and one of the output."""


def whole(
    hf: Mapping[str, Any],
    name: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = 2**31 - 1,
) -> int:
    """Return an integer field from ``least`` to ``most``."""
    value = hf.get(name, default)
    if value is None:
        raise CheckpointError(f"config field {name!r} is missing; expected an integer")
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(
            f"config field {name!r}: found {show(value)}, expected an integer of "
            f"{least} or more, up to {most}"
        )
    return value


def number(
    hf: Mapping[str, Any], name: str, default: float, *, most: float = MOST
) -> float:
    """Return a number field from LEAST to ``most``, so not infinite and not NaN."""
    value = hf.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not LEAST <= value <= most:
        raise CheckpointError(
            f"config field {name!r}: found {show(value)}, expected a number above 0, "
            f"{LEAST:g} to {most:g}"
        )
    return float(value)


def context_length(hf: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens of prompt and output."""
    return whole(hf, "max_position_embeddings", 2048, least=MIN_CONTEXT)


def flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean field."""
    value = hf.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"config field {name!r}: found {value!r}, expected true or false"
        )
    return value


def one_of(hf: Mapping[str, Any], name: str, choices: Mapping[str, str]) -> str:
    """Return the value of ``choices`` for a string field; the first is the default."""
    value = hf.get(name) or next(iter(choices))
    if not isinstance(value, str) or value not in choices:
        raise CheckpointError(
            f"config field {name!r}: found {value!r}, accepted: {', '.join(choices)}"
        )
    return choices[value]


def refuse_unless(hf: Mapping[str, Any], name: str, accepted: Any) -> None:
    """Raise :class:`CheckpointError` if a field has another value; it may be absent."""
    value = hf.get(name)
    if value is not None and value != accepted:
        raise CheckpointError(
            f"config field {name!r}: found {json.dumps(value, default=repr):.80}, "
            f"accepted: {json.dumps(accepted)}"
        )


def cap(hf: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """Return a positive soft-cap field; ``null`` is ``None``."""
    value = hf.get(name, default)
    return None if value is None else number({name: value}, name, 1.0)


def rope_scaling(hf: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Return the base frequency and the scaling, for heads that rotate fully.

    Raises :class:`CheckpointError` naming the field for an unknown kind and for heads
    that rotate in part.
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


def fields_of(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; empty for ``null``, 0 and an absent one."""
    value = hf.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"config field {name!r}: found {show(value)}, expected an object"
        )
    return value


def rope_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters``, or ``rope_scaling`` with its top-level fields."""
    rope = fields_of(hf, "rope_parameters") or fields_of(hf, "rope_scaling")
    names = "rope_theta", "partial_rotary_factor"
    beside = {name: hf[name] for name in names if hf.get(name) is not None}
    return {**beside, **rope}


def original(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Return the context length in training, in tokens."""
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
    """YaRN; raises for the variants of DeepSeek and gpt-oss."""
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
"""Parsers by ``rope_type``."""
