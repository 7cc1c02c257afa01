"""Imports the kernels that plugins registered, and checks them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.device import DeviceType
from inl.errors import PluginError
from inl.plugin.contribution import Contribution, guarded, resolve

if TYPE_CHECKING:
    from inl.spec.kernel import Kernel


def import_kernels(offer: Contribution, kind: DeviceType) -> Iterator[Kernel]:
    """Kernels of one plugin for one device type.

    Raises :class:`~inl.errors.PluginError` for what cannot be imported, is not a
    kernel, or is for an op that is not in the catalog.
    """
    from inl.ops import catalog
    from inl.spec.kernel import Kernel

    for target in offer.kernels.get(kind, ()):
        found = resolve(offer.origin, f"kernels for {kind}", target)
        try:
            several = guarded(partial(_several, found))
        except PluginError as error:
            raise PluginError(
                f"{offer.origin}: kernels for {kind}: {error}"
            ) from error.__cause__
        for kernel in several:
            if not isinstance(kernel, Kernel):
                raise PluginError(
                    f"{offer.origin}: kernels for {kind}, {target!r:.80}: found "
                    f"{kernel!r:.80}, accepted: a Kernel"
                )
            if kernel.op not in catalog():
                raise PluginError(
                    f"{offer.origin}: kernel {kernel.label}: there is no op "
                    f"{kernel.op!r}; known: {', '.join(sorted(catalog()))}"
                )
            yield kernel


def _several(found: Any) -> list[Any]:
    from inl.spec.kernel import Kernel

    if isinstance(found, Kernel):
        return [found]
    return list(found() if callable(found) else found)
