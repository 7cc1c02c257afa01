"""Checks of the arrays that kernels take."""

from __future__ import annotations

from numbers import Real
from typing import Any

from inl.errors import KernelError, RequestError
from inl_toolkit.functional.arrays import dtype_name
from inl_toolkit.functional.dynamics import framework_of

MOST = 2**31
"""Largest size that is accepted."""


def check_number(where: str, name: str, value: Any, least: float = -1e30) -> None:
    """Raise :class:`~inl.errors.KernelError` for what is no number above ``least``.

    Arrays of one number, also those without a value yet, are accepted.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if hasattr(value, "dtype") or (is_number and least < value < 1e30):
        return
    limit = "a finite number" if least < 0 else f"a finite number above {least:g}"
    raise KernelError(f"{where}: {name}: found {value!r:.80}, accepted: {limit}")


def check_size(where: str, name: str, value: Any, least: int = 1) -> None:
    """Raise :class:`~inl.errors.KernelError` for what is no size."""
    if type(value) is not int or not least <= value <= MOST:
        raise KernelError(
            f"{where}: {name}: found {value!r:.80}, accepted: a whole number from "
            f"{least} to {MOST}"
        )


def check_arrays(where: str, *, floating: bool = False, **arrays: Any) -> str:
    """Return the framework of the arrays.

    Raises :class:`~inl.errors.KernelError` for what is no array, for arrays of several
    frameworks, and, if ``floating``, for other than floating-point numbers.
    """
    owners: dict[str, str] = {}
    kinds: set[type] = set()
    for name, each in arrays.items():
        kind = type(each)
        if kind in kinds and not floating:
            continue
        kinds.add(kind)
        try:
            owners.setdefault(framework_of(where, name, each), name)
        except RequestError as error:
            raise KernelError(str(error).removesuffix(", or a number")) from error
        if floating and "float" not in dtype_name(each):
            raise KernelError(
                f"{where}: {name}: found {dtype_name(each)}, accepted: floating-point "
                "numbers"
            )
    if len(owners) > 1:
        found = ", ".join(f"{name} of {owner}" for owner, name in owners.items())
        raise KernelError(f"{where}: found {found}; accepted: arrays of one framework")
    return next(iter(owners))
