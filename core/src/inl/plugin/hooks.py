"""The contract: every hook that a plugin may implement, each with one sentence.

A hook gets ``register`` and calls it once per item; the host checks each item and
remembers who gave it. Things that are heavy are named by a string ``"module:attr"``
and imported when first used. A plugin may leave out parameters that it does not need.
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

CONTRACT = (1, 1)
"""Major and minor version that this core serves."""

GROUP = f"inl.v{CONTRACT[0]}"
"""Entry-point group of the major version."""

FEATURES: frozenset[str] = frozenset()
"""Additions that a plugin may ask for by name in its ``INL_FEATURES``."""

hookspec = pluggy.HookspecMarker("inl")
hookimpl = pluggy.HookimplMarker("inl")
"""Marks a function as the implementation of the hook that has its name."""


class RegisterBackend(Protocol):
    """Take a backend, called with a Device, and the probe that finds its devices."""

    def __call__(
        self,
        device_type: str,
        backend: str | Callable[[Device], Any],
        probe: str | Probe | None = None,
    ) -> None: ...


class RegisterKernels(Protocol):
    """Take a kernel or several, or the name of either or of a function giving them."""

    def __call__(self, kernels: str | Kernel | Sequence[Kernel]) -> None: ...


class RegisterModel(Protocol):
    """Take a model under a name of ``architectures`` or ``model_type`` in a config."""

    def __call__(self, architecture: str, model: str | Model) -> None: ...


class RegisterFunctions(Protocol):
    """Take the functions of a framework, and the modules that define its arrays."""

    def __call__(
        self,
        framework: str,
        functions: str | Functions,
        modules: Sequence[str] = (),
    ) -> None: ...


@hookspec
def inl_register_backends(register: RegisterBackend) -> None:
    """Register the backend of each device type that this plugin serves."""


@hookspec
def inl_register_kernels(register: RegisterKernels, device_type: DeviceType) -> None:
    """Register kernels for one device type, beside those of its own backend."""


@hookspec
def inl_register_models(register: RegisterModel) -> None:
    """Register model architectures."""


@hookspec
def inl_register_functions(register: RegisterFunctions) -> None:
    """Register functions for users' own arrays, one set for each framework."""
