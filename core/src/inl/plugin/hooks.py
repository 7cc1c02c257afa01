"""Plugin contract: the hooks that a plugin may implement.

A hook receives ``register`` and calls it once per item; the host validates each item.
An item may be a string ``"module:attribute"``, which is imported on first use. An
implementation may omit parameters that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from inl.backend.collectives import Rank
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.device import Device, DeviceInfo, DeviceType, Probe
    from inl.placement.placement import Placement
    from inl.spec.encoder import Encoder
    from inl.spec.functions import Functions
    from inl.spec.kernel import Kernel
    from inl.spec.model import Model

CONTRACT = (2, 1)
"""Major and minor version of the contract that this core serves. Plugins of contract 1
are served too, see :mod:`inl.plugin.contract_v1`."""

GROUP = f"inl.v{CONTRACT[0]}"
"""Entry-point group of the major version."""

FEATURES: Mapping[str, str] = {
    "program_info": "`compile` gets a `ProgramInfo` for every program",
    "addresses": "the core reads `Addresses`, the memory of a cache",
    "block_io": "the core copies blocks of a cache by `BlockIO`",
    "slot_io": "the core copies the state of slots by `SlotIO`",
    "encoders": "the core compiles the program `encode` of an `Encoder`",
    "pooled": "the core calls the ops that pool the tokens of a sequence",
    "axis_positions": "tokens of a step may have positions along several axes",
    "spans": "spans of tokens of a step may attend to each other in both directions",
    "layer_features": "features of tokens are added after layers that a model names",
    "collectives_by_axis": "ranks have an address and axes, and `Collectives` an axis",
    "hosts": "a backend is registered with `hosts`, which opens a mesh over several",
}
"""Features of this core, each with a sentence: names that a plugin may require in its
``INL_FEATURES``, or look up when its backend is opened. None is ever removed."""

hookspec = pluggy.HookspecMarker("inl")
hookimpl = pluggy.HookimplMarker("inl")
"""Decorator for an implementation of the hook with the same name."""


class RegisterBackend(Protocol):
    """Registers a backend factory, called with a Device, and a device probe.

    hosts: factory of a mesh over several hosts, called on each of them.
    """

    def __call__(
        self,
        device_type: str,
        backend: str | Callable[[Device], Any],
        probe: str | Probe | None = None,
        hosts: str | Callable[[Device, Placement, Rank], Any] | None = None,
    ) -> None: ...


class RegisterKernels(Protocol):
    """Registers one kernel, a sequence, or the name of either or of a function that
    returns them.
    """

    def __call__(self, kernels: str | Kernel | Sequence[Kernel]) -> None: ...


class RegisterModel(Protocol):
    """Registers a model under an ``architectures`` or ``model_type`` name."""

    def __call__(self, architecture: str, model: str | Model | Encoder) -> None: ...


class RegisterFunctions(Protocol):
    """Registers the functions of a framework and the modules of its array classes."""

    def __call__(
        self,
        framework: str,
        functions: str | Functions,
        modules: Sequence[str] = (),
    ) -> None: ...


class RegisterPlace(Protocol):
    """Registers what starts a worker for the devices ``SCHEME:.../DEVICE``.

    It is called with an ``inl.workers.place.Request`` and returns a ``Started``.
    devices: lists the devices there, pairs of a name and a ``DeviceInfo``.
    """

    def __call__(
        self,
        scheme: str,
        start: str | Callable[[Any], Any],
        devices: str | Callable[[], Sequence[tuple[str, DeviceInfo]]] | None = None,
    ) -> None: ...


class RegisterFormat(Protocol):
    """Registers the reader of model files whose names end with ``suffix``."""

    def __call__(
        self, suffix: str, reader: str | Callable[[Path], Checkpoint]
    ) -> None: ...


class RegisterDrafter(Protocol):
    """Registers a drafter factory under a value of ``EngineConfig.speculation``.

    It is called with an ``inl.speculation.plugin_drafter.DraftTarget`` and returns an
    ``inl.speculation.drafters.Drafter``.
    """

    def __call__(self, name: str, drafter: str | Callable[[Any], Any]) -> None: ...


class RegisterRouter(Protocol):
    """Registers a router factory under a value of ``inl serve --router``.

    It is called without arguments and returns an ``inl.fleet.plugin_router.Policy``.
    """

    def __call__(self, name: str, router: str | Callable[[], Any]) -> None: ...


class RegisterTransport(Protocol):
    """Registers a transport factory under a value of ``EngineConfig.kv_transport``.

    It is called without arguments and returns an
    ``inl.kv_transfer.transport.Transport``.
    """

    def __call__(self, name: str, transport: str | Callable[[], Any]) -> None: ...


class RegisterStore(Protocol):
    """Registers a store factory under the name of ``EngineConfig.kv_store``.

    It is called with the address there, and returns an ``inl.kv_tiers.store.Store``.
    """

    def __call__(self, name: str, store: str | Callable[..., Any]) -> None: ...


class RegisterCommand(Protocol):
    """Registers the command ``inl NAME``, an annotated function, and its summary."""

    def __call__(
        self, name: str, command: str | Callable[..., Any], summary: str
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


@hookspec
def inl_register_places(register: RegisterPlace) -> None:
    """Register the places where workers are started."""


@hookspec
def inl_register_formats(register: RegisterFormat) -> None:
    """Register readers of checkpoint formats."""


@hookspec
def inl_register_drafters(register: RegisterDrafter) -> None:
    """Register drafters of speculation."""


@hookspec
def inl_register_routers(register: RegisterRouter) -> None:
    """Register routers of fleets."""


@hookspec
def inl_register_transports(register: RegisterTransport) -> None:
    """Register transports of cached contents between engines."""


@hookspec
def inl_register_stores(register: RegisterStore) -> None:
    """Register stores of blocks that engines share."""


@hookspec
def inl_register_commands(register: RegisterCommand) -> None:
    """Register commands of the command line."""
