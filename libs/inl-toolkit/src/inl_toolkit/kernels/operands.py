"""Checks of the arrays that kernels take."""

from __future__ import annotations

from typing import Any

from inl.errors import KernelError, RequestError
from inl_toolkit.functional.arrays import dtype_name
from inl_toolkit.functional.dynamics import framework_of


def check_arrays(where: str, *, floating: bool = False, **arrays: Any) -> str:
    """Return the framework of the arrays.

    Raises :class:`~inl.errors.KernelError` for what is no array, for arrays of several
    frameworks, and, if ``floating``, for other than floating-point numbers.
    """
    owners: dict[str, str] = {}
    for name, each in arrays.items():
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
