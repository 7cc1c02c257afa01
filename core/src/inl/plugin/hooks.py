"""Plugin contract: the hooks that a plugin may implement.

A hook receives ``register`` and calls it once per item; the host validates each item.
An item may be a string ``"module:attribute"``, which is imported on first use. An
implementation may omit parameters that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from inl.device import Device, DeviceType, Probe
    from inl.spec.functions import Functions
    from inl.spec.kernel import Kernel
    from inl.spec.model import Model

CONTRACT = (1, 2)
"""Major and minor version of the contract that this core serves."""

GROUP = f"inl.v{CONTRACT[0]}"
"""Entry-point group of the major version."""

FEATURES: frozenset[str] = frozenset({"collectives_by_axis"})
"""Optional features that a plugin may require in its ``INL_FEATURES``."""

hookspec = pluggy.HookspecMarker("inl")
hookimpl = pluggy.HookimplMarker("inl")
"""Decorator for an implementation of the hook with the same name."""


class RegisterBackend(Protocol):
    """Registers a backend factory, called with a Device, and a device probe."""

    def __call__(
        self,
        device_type: str,
        backend: str | Callable[[Device], Any],
        probe: str | Probe | None = None,
    ) -> None: ...


class RegisterKernels(Protocol):
    """Registers one kernel, a sequence, or the name of either or of a function that
    returns them.
    """

    def __call__(self, kernels: str | Kernel | Sequence[Kernel]) -> None: ...


class RegisterModel(Protocol):
    """Registers a model under an ``architectures`` or ``model_type`` name."""

    def __call__(self, architecture: str, model: str | Model) -> None: ...


class RegisterFunctions(Protocol):
    """Registers the functions of a framework and the modules of its array classes."""

    def __call__(
        self,
        framework: str,
        functions: str | Functions,
        modules: Sequence[str] = (),
    ) -> None: ...


@hookspec
def inl_register_backends(register: RegisterBackend) -> None:
    """Register the backend of each device type that the plugin serves."""


@hookspec
def inl_register_kernels(register: RegisterKernels, device_type: DeviceType) -> None:
    """Register additional kernels for one device type."""


@hookspec
def inl_register_models(register: RegisterModel) -> None:
    """Register model architectures."""


@hookspec
def inl_register_functions(register: RegisterFunctions) -> None:
    """Register the INL functions for the arrays of a framework."""
