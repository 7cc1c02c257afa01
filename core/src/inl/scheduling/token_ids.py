"""Validation of token ids and integers that callers pass."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.spec.message import IntArray

MAX_INT32 = 2**31 - 1


def read_token_ids(name: str, values: Iterable[int]) -> tuple[list[int], IntArray]:
    """Return ids as a list and as an int32 array.

    Raises :class:`~inl.errors.RequestError` for a value that is not an integer of
    0 .. 2**31 - 1.
    """
    given: list[Any] = []
    try:
        given.extend(values)
    except TypeError as error:
        raise _bad_id(name, given, error) from error
    try:
        # Checks types and range in C, faster than a Python loop would.
        packed = array("i", given)
    except (TypeError, OverflowError) as error:
        raise _bad_id(name, given, error) from error
    if not packed:
        return [], np.zeros(0, np.int32)
    ids = np.frombuffer(packed, np.int32)
    if int(ids.min()) < 0:
        raise _bad_id(name, given, None)
    return packed.tolist(), ids


def _bad_id(name: str, given: list[Any], error: Exception | None) -> RequestError:
    """Return the error for the first value that is not a token id."""
    for position, value in enumerate(given):
        if not _is_integer(value):
            return RequestError(f"{name}[{position}]: {error}; accepts token ids")
        if not 0 <= index(value) <= MAX_INT32:
            return RequestError(
                f"{name}[{position}]: found {index(value)}, accepts 0 to {MAX_INT32}"
            )
    return RequestError(f"{name}[0]: {error}; accepts token ids")


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def read_allowed_ids(values: Iterable[int] | None) -> tuple[int, ...] | None:
    """Return ``allowed_token_ids`` in ascending order, each once, or ``None``.

    Raises :class:`~inl.errors.RequestError` for an empty collection or a bad id.
    """
    if values is None:
        return None
    ids, _ = read_token_ids("allowed_token_ids", values)
    if not ids:
        raise RequestError(
            "allowed_token_ids: found no tokens, accepts None or at least one token id"
        )
    return tuple(sorted(set(ids)))


def read_integer(
    name: str, value: int, least: int | None = None, most: int | None = None
) -> int:
    """Return an integer of ``least`` .. ``most``; raises ``RequestError``."""
    try:
        number = index(value)
    except TypeError as error:
        raise RequestError(f"{name}: found {value!r}, accepts an int") from error
    if least is not None and number < least:
        raise RequestError(f"{name}: found {number}, accepts {least} and above")
    if most is not None and number > most:
        raise RequestError(f"{name}: found {number}, accepts at most {most}")
    return number
