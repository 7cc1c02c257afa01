"""Sampling values that a model's files recommend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError

LEAST_TOP_P: Final = 1e-6


class _Field(NamedTuple):
    valid: Callable[[float], bool]
    accepted: str
    convert: Callable[[float], float]


FIELDS: Final = {
    "temperature": _Field(lambda x: 0 <= x <= 1e6, "0 to 1e6", float),
    "top_k": _Field(
        lambda x: x == int(x) and -1 <= x < 2**31,
        "a whole number from -1",
        lambda x: max(int(x), 0),
    ),
    "top_p": _Field(lambda x: 0 <= x <= 1, "0 to 1", lambda x: max(x, LEAST_TOP_P)),
    "min_p": _Field(lambda x: 0 <= x <= 1, "0 to 1", float),
    "repetition_penalty": _Field(
        lambda x: 0.01 <= x <= 100, "0.01 to 100", float
    ),
}  # fmt: skip
"""Fields of ``generation_config.json`` that are read, which are options of a request of
the same names."""

GGUF_NAMES: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Metadata of GGUF files behind ``general.sampling.``, and the fields."""


def gguf_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``generation_config.json`` that a GGUF file has."""
    found = {
        field: metadata.get(f"general.sampling.{name}")
        for name, field in GGUF_NAMES.items()
    }
    return {field: value for field, value in found.items() if value is not None}


def sampling_defaults(fields: Mapping[str, Any], where: str) -> dict[str, float]:
    """Return the sampling options that a generation config sets.

    Without ``do_sample`` a temperature alone asks for sampling; ``false`` is greedy
    decoding, and ``true`` without a temperature is 1. Raises
    :class:`~inl.errors.CheckpointError` for a value that is not accepted.
    """
    options = {
        name: _read(fields[name], name, field, where)
        for name, field in FIELDS.items()
        if fields.get(name) is not None
    }
    samples = fields.get("do_sample")
    if samples is False:
        options["temperature"] = 0.0
    elif samples is True:
        options.setdefault("temperature", 1.0)
    return options


def _read(value: Any, name: str, field: _Field, where: str) -> float:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not math.isfinite(value) or not field.valid(value):
        raise CheckpointError(
            f"{where}: {name}: found {show(value)}; accepted: {field.accepted}, or "
            'EngineConfig(generation_config="none") (--generation-config none), which '
            "does not read it"
        )
    return field.convert(value)
