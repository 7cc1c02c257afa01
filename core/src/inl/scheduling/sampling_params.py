"""Validation of sampling parameters, and the sampler that a request needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
"""Accepted ranges of the floating-point parameters, bounds included."""

PENALTIES = PARAMS[4:]


class TokenLogprob(NamedTuple):
    """Log-probability of a generated token, and of the most likely tokens there."""

    token: int
    logprob: float
    """Natural logarithm, before penalties, bias, masks, temperature and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, in descending order; as many as
    ``logprobs`` asks for."""


make_logprob = partial(tuple.__new__, TokenLogprob)
"""Make a :class:`TokenLogprob` from a triple, faster than its constructor."""


def check_number(name: str, value: Any) -> float:
    """Return a parameter of :data:`RANGES` as a float.

    Raises :class:`~inl.errors.RequestError` if it is not a number in its range.
    """
    least, most = RANGES[name]
    # NaN and infinity fail the comparison too.
    if not (isinstance(value, int | float) and least <= value <= most):
        accepted = "0 and above" if most == MAX_FLOAT32 else f"{least:g} to {most:g}"
        raise RequestError(f"{name}: found {value!r}, accepts {accepted}")
    return float(value)


def check_bias(bias: Any) -> dict[int, float]:
    """Return a logit bias as a dict by token id, empty for ``None``.

    Raises :class:`~inl.errors.RequestError` for a key that is not a token id or a
    value outside -1e9 to 1e9.
    """
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise RequestError(
            f"logit_bias: found {bias!r:.60}, accepts a mapping of token ids to numbers"
        )
    checked: dict[int, float] = {}
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
        checked[number] = float(value)
    return checked


def check_logprobs(value: Any, name: str = "logprobs") -> int | None:
    """Return the number of top logprobs per token, ``None`` for no logprobs at all.

    Raises :class:`~inl.errors.RequestError` for anything but ``None`` and 0 to
    :data:`~inl.spec.step.TOP`.
    """
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and 0 <= value <= TOP):
        raise RequestError(
            f"{name}: found {value!r}, accepts None, or the number of most likely "
            f"tokens to report beside each token, 0 to {TOP}"
        )
    return int(value)


def sampler_for(params: Mapping[str, float], *, special: bool = False) -> str:
    """Return the cheapest of :data:`~inl.spec.step.SAMPLERS` that serves ``params``.

    Filters have no effect at temperature 0. special: the request has a logit bias or
    asks for logprobs, which only "sample_filtered" serves.
    """
    neutral = dict(zip(PARAMS, NEUTRAL, strict=True))
    changed = {name for name in PARAMS if params[name] != neutral[name]}
    hot = "temperature" in changed
    if special or changed.intersection(PENALTIES) or (hot and len(changed) > 1):
        return "sample_filtered"
    return "sample" if hot else "greedy"


def rank(sampler: str) -> int:
    """Return the index in :data:`~inl.spec.step.SAMPLERS`, in ascending cost."""
    return SAMPLERS.index(sampler)
