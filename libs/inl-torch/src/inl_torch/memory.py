"""A full device: which errors say so, and what its user is told instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any, Final

import torch

from inl.backend.base import DeviceMemory, Program
from inl.errors import OutOfMemory

FULL: Final = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "ALLOC_FAILED",
)
"""How torch's allocators, the driver and its libraries say that there is no more."""

ASKED: Final = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")
"""How they say what was asked for."""


def full(error: BaseException) -> BaseException | None:
    """The error of a full device that ``error`` is, or came of; ``None`` otherwise.

    What was begun when memory ran out, such as a capture, may fail in its own way.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.cuda.OutOfMemoryError | MemoryError):
            return found
        words = str(found)
        if isinstance(found, RuntimeError) and any(word in words for word in FULL):
            return found
        found = found.__cause__ or found.__context__
    return None


@contextmanager
def allocating(
    nbytes: int, where: str, memory: Callable[[], DeviceMemory], advice: str = ""
) -> Iterator[None]:
    """Turn a full device into :class:`OutOfMemory`: what was asked for, what is free.

    advice: what else would fit.
    """
    try:
        yield
    except Exception as error:
        if full(error) is None:
            raise
        raise OutOfMemory(
            f"{where}: {nbytes} bytes ({nbytes / 2**20:.1f} MiB) do not fit, "
            f"{memory().free} bytes are free; {advice}lower cache_bytes, max_batch "
            "or context, or take a smaller dtype or model"
        ) from error


def surviving(
    program: Program, where: str, usage: Callable[[], DeviceMemory]
) -> Program:
    """Run a program whose failure for want of memory leaves the device usable.

    Raises :class:`OutOfMemory`; what the failed call took is given back.
    """

    def run(*args: Any) -> tuple[Any, ...]:
        try:
            return program(*args)
        except Exception as error:
            found = full(error)
            if found is None:
                raise
            asked = ASKED.search(str(found))
            wanted = asked[1] if asked else f"its memory ({found})"
            cause = error
        # Whoever keeps the error must not keep the tensors of the call that failed.
        for each in {id(found): found, id(cause): cause}.values():
            clear_frames(each.__traceback__)
        torch.cuda.empty_cache()
        raise OutOfMemory(
            f"{where}: {wanted} more does not fit, {usage().free} bytes are free; "
            "lower token_budget, max_batch or cache_bytes"
        ) from cause

    return run
