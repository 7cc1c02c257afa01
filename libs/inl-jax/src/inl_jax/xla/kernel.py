"""Makes kernels of JAX functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from inl.spec.kernel import Kernel

TECHNOLOGY = "xla"


def kernel(run: Callable[..., Any], op: str = "", **more: Any) -> Kernel:
    """Return the kernel of a function; its op has the function's name by default.

    The function is jitted, so that a call outside of a program is one computation, and
    calls with the same shapes within a program are traced once. Its keyword-only
    parameters, the op's attributes, are static.
    """
    return Kernel(op or run.__name__, TECHNOLOGY, inlined(run), **more)


def inlined(run: Callable[..., Any]) -> Any:
    """Jit a function with static keyword-only parameters, inlined in programs."""
    parameters = inspect.signature(run).parameters.values()
    static = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return jax.jit(run, static_argnames=static, inline=True)
