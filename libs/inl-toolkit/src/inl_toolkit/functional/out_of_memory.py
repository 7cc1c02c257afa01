"""Out-of-memory errors of NumPy, torch and JAX, as the project's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from traceback import clear_frames
from types import FunctionType
from typing import Any, TypeVar

from inl.errors import OutOfMemory

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

PHRASES = (
    "RESOURCE_EXHAUSTED",
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "ALLOC_FAILED",
)
"""Phrases in the ``RuntimeError`` of the allocators of torch and XLA."""


def check_memory(where: str, error: Exception) -> None:
    """Raise :class:`~inl.errors.OutOfMemory` if an error says that memory is exhausted.

    Arrays that only the error holds are released.
    """
    found = str(error)
    phrased = any(phrase in found for phrase in PHRASES)
    if not isinstance(error, MemoryError) and not phrased:
        return
    clear_frames(error.__traceback__)
    first = found.partition("\n")[0][:200] or type(error).__name__
    raise OutOfMemory(
        f"{where}: what it computes does not fit in memory: {first}; take smaller "
        "arrays or a smaller dtype, or free others"
    ) from error


def translating(function: F) -> F:
    """Let a function raise :class:`~inl.errors.OutOfMemory` for what does not fit."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            check_memory(function.__qualname__.removesuffix(".__init__"), error)
            raise

    # functools.wraps keeps the signature, which mypy does not express as F.
    return call  # type: ignore[return-value]


def translating_methods(kind: C) -> C:
    """Apply :func:`translating` to the methods that a class defines."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType):
            setattr(kind, name, translating(member))
    return kind
