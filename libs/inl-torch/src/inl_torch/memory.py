"""Translation of torch's out-of-memory errors to :class:`~inl.errors.OutOfMemory`."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from traceback import clear_frames
from typing import Any, Final

import torch

from inl.backend import allocation
from inl.backend.base import DeviceMemory, Program
from inl.errors import OutOfMemory

OOM_PHRASES: Final = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "ALLOC_FAILED",
)
"""Phrases in the ``RuntimeError`` of torch's allocators, drivers and libraries."""

REQUESTED: Final = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")
"""The size of the failed allocation in such a message."""


def find_oom(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error in the chain of causes of ``error``, if any.

    A graph capture that runs out of memory, for example, ends with another error.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.cuda.OutOfMemoryError | MemoryError):
            return cause
        message = str(cause)
        if isinstance(cause, RuntimeError) and any(
            phrase in message for phrase in OOM_PHRASES
        ):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def allocating(
    nbytes: int, where: str, memory: Callable[[], DeviceMemory], advice: str = ""
) -> AbstractContextManager[None]:
    """As :func:`inl.backend.allocation.allocating`, for an allocation of torch."""
    return allocation.allocating(
        nbytes, where, memory, lambda error: find_oom(error) is not None, advice
    )


def translate_oom(
    program: Program,
    where: str,
    memory: Callable[[], DeviceMemory],
    empty_cache: Callable[[], None] = torch.cuda.empty_cache,
) -> Program:
    """Wrap a program so that it raises :class:`OutOfMemory`.

    The device stays usable: the tensors of the failed call are released, and the memory
    that torch caches is freed.
    """

    def run(*args: Any) -> tuple[Any, ...]:
        try:
            return program(*args)
        except Exception as error:
            oom = find_oom(error)
            if oom is None:
                raise
            match = REQUESTED.search(str(oom))
            requested = match[1] if match else f"its memory ({oom})"
            cause = error
        # The raised error keeps its cause, whose frames would keep the call's tensors.
        for each in {id(oom): oom, id(cause): cause}.values():
            clear_frames(each.__traceback__)
        empty_cache()
        raise OutOfMemory(
            f"{where}: {requested} more does not fit, {memory().free} bytes are free; "
            "lower token_budget, max_batch or cache_bytes"
        ) from cause

    return run
