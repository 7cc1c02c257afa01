"""Imports and validates the kernels that plugins registered."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.device import DeviceType
from inl.errors import PluginError
from inl.plugin.contribution import Contribution, guarded, resolve

if TYPE_CHECKING:
    from inl.spec.kernel import Kernel


def import_kernels(items: Contribution, kind: DeviceType) -> Iterator[Kernel]:
    """Yield the kernels of one plugin for one device type.

    Raises :class:`~inl.errors.PluginError` if an item cannot be imported, is not a
    kernel, or names an op that is not in the catalog.
    """
    from inl.ops import catalog, unknown_op
    from inl.spec.kernel import Kernel

    for target in items.kernels.get(kind, ()):
        value = resolve(items.origin, f"kernels for {kind}", target)
        try:
            kernels = guarded(partial(_as_list, value))
        except PluginError as error:
            raise PluginError(
                f"{items.origin}: kernels for {kind}: {error}"
            ) from error.__cause__
        for kernel in kernels:
            if not isinstance(kernel, Kernel):
                raise PluginError(
                    f"{items.origin}: kernels for {kind}, {target!r:.80}: found "
                    f"{kernel!r:.80}, accepted: a Kernel"
                )
            if kernel.op not in catalog():
                raise PluginError(
                    f"{items.origin}: kernel {kernel.label}: {unknown_op(kernel.op)}"
                )
            yield kernel


def _as_list(value: Any) -> list[Any]:
    """Return a kernel, a sequence or the result of a function as a list."""
    from inl.spec.kernel import Kernel

    if isinstance(value, Kernel):
        return [value]
    return list(value() if callable(value) else value)
