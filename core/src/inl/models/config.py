"""Typed access to Hugging Face config fields, with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError

LEAST, MOST = 1e-30, 1e30
"""Default range of numbers, in which float32 can compute with them."""
MAX_EPS = 1.0
"""Largest epsilon of a norm."""
MIN_CONTEXT = 2
"""Shortest context in tokens: one of the prompt and one of the output."""


def missing(name: str, expected: str) -> CheckpointError:
    """Return the error for a field that is absent or null."""
    return CheckpointError(f"config field {name!r} is missing; expected {expected}")


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
        raise missing(name, "an integer")
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


def fields_of(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; empty for ``null``, 0 and an absent one."""
    value = hf.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"config field {name!r}: found {show(value)}, expected an object"
        )
    return value
