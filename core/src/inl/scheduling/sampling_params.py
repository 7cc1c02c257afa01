"""How a request's tokens are chosen: parameters checked, and what each needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

from inl.errors import RequestError
from inl.spec.step import NEUTRAL, PARAMS, SAMPLERS, TOP

MAX_FLOAT32 = 2.0**128 - 2.0**104
MAX_BIAS = 1e9

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_FLOAT32),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Accepted values of the parameters that are no whole numbers."""

PENALTIES = PARAMS[4:]


class TokenLogprob(NamedTuple):
    """How likely a token of an answer was to the model."""

    token: int
    logprob: float
    """Natural logarithm, before penalties, bias, temperature and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first; as many as asked for."""


def check_number(name: str, value: Any) -> float:
    """Return a parameter as a float; raises :class:`~inl.errors.RequestError`."""
    least, most = RANGES[name]
    # NaN and infinity fail the comparison too.
    if not (isinstance(value, int | float) and least <= value <= most):
        accepted = "0 and above" if most == MAX_FLOAT32 else f"{least:g} to {most:g}"
        raise RequestError(f"{name}: found {value!r}, accepts {accepted}")
    return float(value)


def check_bias(bias: Any) -> dict[int, float]:
    """Return a bias by token id; raises :class:`~inl.errors.RequestError`."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise RequestError(
            f"logit_bias: found {bias!r:.60}, accepts a mapping of token ids to numbers"
        )
    found: dict[int, float] = {}
    for token, value in bias.items():
        try:
            number = index(token)
        except TypeError:
            number = -1
        if number < 0 or isinstance(token, bool):
            raise RequestError(f"logit_bias: found token {token!r}, accepts token ids")
        if not (isinstance(value, int | float) and abs(value) <= MAX_BIAS):
            raise RequestError(
                f"logit_bias[{number}]: found {value!r}, accepts {-MAX_BIAS:g} to "
                f"{MAX_BIAS:g}; -100 bans a token"
            )
        found[number] = float(value)
    return found


def check_logprobs(value: Any) -> int | None:
    """Return how many of the likeliest tokens to report, or ``None`` for nothing."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and 0 <= value <= TOP):
        raise RequestError(
            f"logprobs: found {value!r}, accepts None, or how many of the likeliest "
            f"tokens to report beside the chosen one, 0 to {TOP}"
        )
    found: int | None = value
    return found


def sampler_for(params: Mapping[str, float], *, special: bool = False) -> str:
    """Return the cheapest of :data:`~inl.spec.step.SAMPLERS` that serves ``params``.

    Filters do nothing at temperature 0. special: it has biases or wants logprobs.
    """
    neutral = dict(zip(PARAMS, NEUTRAL, strict=True))
    changed = {name for name in PARAMS if params[name] != neutral[name]}
    hot = "temperature" in changed
    if special or changed.intersection(PENALTIES) or (hot and len(changed) > 1):
        return "sample_filtered"
    return "sample" if hot else "greedy"


def rank(sampler: str) -> int:
    """Place among :data:`~inl.spec.step.SAMPLERS`, by rising cost."""
    return SAMPLERS.index(sampler)


def finite(values: Any) -> bool:
    """Whether all numbers are neither NaN nor infinite."""
    return all(math.isfinite(value) for value in values)
