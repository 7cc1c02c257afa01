"""Test cases of the INL ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from inl.spec.op import Case

OPERANDS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "full": lambda shape: shape,
    "row": lambda shape: shape[-1:],
    "one row": lambda shape: (1, shape[-1]),
    "column": lambda shape: (*shape[:-1], 1),
    "per sequence": lambda shape: (shape[0], *(1,) * (len(shape) - 2), shape[-1]),
    "scalar": lambda _: (),
}
"""Operand shapes that broadcast to [..., D], by name."""


def _operand(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return np.asarray(rng.standard_normal(shape))


def dynamics_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases that cover every operand in every broadcast shape, with odd row sizes."""
    names = list(OPERANDS)
    for shape in ((7,), (3, 64), (2, 3, 77)):
        for shift in range(len(names)) if len(shape) == 3 else (0, 1):
            forms = [names[(shift + index) % len(names)] for index in range(5)]
            parts = [
                _operand(rng, OPERANDS[form](shape) if len(shape) > 1 else shape)
                for form in forms
            ]
            x = rng.standard_normal(shape)
            label = "x".join(map(str, shape)) + (f"/{forms[0]}" if shift else "")
            yield Case(label, (x, *parts), {"dt": 0.1 + 0.3 * (shift == 1)})


def _controlled(
    rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0
) -> tuple[Any, ...]:
    x, v = scale * rng.standard_normal((2, *shape))
    controller = 2 * scale * rng.standard_normal((*shape[:-1], 3 * shape[-1]))
    return x, v, rng.standard_normal(shape[-1]), controller


def step_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases without clamps, with active clamps, and with a shared controller output."""
    clamps = {"dt": 0.1, "most_beta": 2.0, "limit": 10.0}
    yield Case("3x64", _controlled(rng, (3, 64)), {"dt": 0.1})
    yield Case("5x33/clamped", _controlled(rng, (5, 33), 4.0), clamps)
    x, v, mu, controller = _controlled(rng, (2, 3, 16))
    yield Case("2x3x16/shared", (x, v, np.asarray(mu[0]), controller[0, 0]), clamps)


def n_steps_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases of 0, 1 and several steps."""
    for steps in (0, 1, 5):
        attrs = {"n_steps": steps, "dt": 0.1}
        yield Case(f"3x40/{steps}", _controlled(rng, (3, 40)), attrs)
    attrs = {"n_steps": 3, "dt": 0.2, "most_beta": 2.0, "limit": 10.0}
    yield Case("4x24/3/clamped", _controlled(rng, (4, 24), 4.0), attrs)


def silu_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases of normally distributed and of large inputs."""
    yield Case("3x33", (4 * rng.standard_normal((3, 33)),))
    yield Case("edges", (np.array([[-100.0, -20.0, 0.0, 20.0, 100.0]]),))


def block_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases with velocities below and above the clamp, with and without ``context``."""
    from inl.ops.inl import InlBlock

    for tokens, hidden, inner, scale in ((1, 16, 8, 1.0), (5, 48, 64, 8.0)):
        h, velocity = rng.standard_normal((2, tokens, hidden))
        first = rng.standard_normal((inner, 2 * hidden)) / hidden**0.5
        first[:, hidden:] /= scale
        second = 2 * rng.standard_normal((3 * hidden, inner)) / inner**0.5
        bias = rng.standard_normal(inner), rng.standard_normal(3 * hidden)
        mu = scale * rng.standard_normal(hidden)
        context = rng.standard_normal((hidden, hidden)) / hidden**0.5
        w = InlBlock(mu, first, bias[0], second, bias[1], context)
        name = f"{tokens}x{hidden}x{inner}"
        yield Case(name, (h, scale * velocity, w), {"dt": 0.1})
        still = w._replace(context=None)
        yield Case(f"{name}/still", (h, scale * velocity, still), {"dt": 0.1})
