"""Items that one plugin registers, validated and recorded with their origin."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from inl.device import DeviceType, Probe
from inl.errors import PluginError
from inl.plugin.discover import Origin
from inl.plugin.hooks import CONTRACT

if TYPE_CHECKING:
    from inl.backend.collectives import Rank
    from inl.device import Device
    from inl.placement.placement import Placement
    from inl.spec.encoder import Encoder
    from inl.spec.functions import Functions
    from inl.spec.kernel import Kernel
    from inl.spec.model import Model

T = TypeVar("T")

SCHEME = re.compile(r"[a-z][a-z0-9]{0,31}")
SUFFIX = re.compile(r"(\.[a-z0-9_]{1,32}){1,3}")
OWN_SUFFIXES = frozenset({".bin", ".gguf", ".json", ".pt", ".pth", ".safetensors"})
"""Suffixes of files that the core reads."""
WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""Name of a drafter, a router, a transport or a store."""
OWN_DRAFTERS = ("ngram", "model", "eagle", "mtp")
"""Values of ``EngineConfig.speculation`` that the core has."""
AUTOMATIC = "auto"
"""Value of ``EngineConfig.speculation`` that lets the engine choose."""
COMMAND = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
MAX_COMMAND = 32
MAX_SUMMARY = 80

TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""``"module:attribute"``."""


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A registered backend, imported on first use."""

    device_type: DeviceType
    backend: str | Callable[[Device], Any]
    probe: str | Probe | None
    origin: Origin
    contract: tuple[int, int] = CONTRACT
    """Contract of its plugin."""
    hosts: str | Callable[[Device, Placement, Rank], Any] | None = None
    """Opens a mesh over several hosts, on each of them."""


@dataclass(frozen=True, slots=True)
class FunctionsEntry:
    """Registered functions of a framework, imported on first use."""

    functions: str | Functions
    modules: tuple[str, ...]
    """Top-level modules that define the framework's array classes."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A registered command, imported when it runs."""

    command: str | Callable[..., Any]
    summary: str
    """One sentence of the help page."""


@dataclass(frozen=True, slots=True)
class PlaceEntry:
    """A registered place, imported when a worker is started there."""

    start: str | Callable[..., Any]
    devices: str | Callable[..., Any] | None
    """Lists the devices that workers could have there."""


@dataclass(slots=True)
class Contribution:
    """Items of one plugin. Its methods are the ``register`` argument of the hooks.

    Each raises :class:`~inl.errors.PluginError` for an invalid item.
    """

    origin: Origin
    backends: dict[DeviceType, BackendEntry] = field(default_factory=dict)
    kernels: dict[DeviceType, list[Any]] = field(default_factory=dict)
    models: dict[str, str | Model | Encoder] = field(default_factory=dict)
    functions: dict[str, FunctionsEntry] = field(default_factory=dict)
    contract: tuple[int, int] = CONTRACT
    """Contract that the plugin was written for."""
    places: dict[str, PlaceEntry] = field(default_factory=dict)
    formats: dict[str, str | Callable[..., Any]] = field(default_factory=dict)
    drafters: dict[str, str | Callable[..., Any]] = field(default_factory=dict)
    routers: dict[str, str | Callable[..., Any]] = field(default_factory=dict)
    transports: dict[str, str | Callable[..., Any]] = field(default_factory=dict)
    stores: dict[str, str | Callable[..., Any]] = field(default_factory=dict)
    commands: dict[str, CommandEntry] = field(default_factory=dict)

    def register_backend(
        self,
        device_type: str,
        backend: str | Callable[[Device], Any],
        probe: str | Probe | None = None,
        hosts: str | Callable[[Device, Placement, Rank], Any] | None = None,
    ) -> None:
        """Register the backend of a device type.

        Without a probe, device 0 is assumed to be available.
        """
        kind = DeviceType(device_type)
        where = f"backend of {kind}"
        _check_target(where, backend, callable(backend), "a class")
        for name, given in (("probe", probe), ("hosts", hosts)):
            valid = given is None or callable(given)
            _check_target(f"{name} of {kind}", given, valid, "a function")
        if kind in self.backends:
            raise PluginError(f"{where}: registered twice")
        self.backends[kind] = BackendEntry(
            kind, backend, probe, self.origin, self.contract, hosts
        )

    def register_kernels(self, device_type: DeviceType) -> Callable[[Any], None]:
        """Return the ``register`` function for the kernels of a device type."""

        def register(kernels: str | Kernel | Sequence[Kernel]) -> None:
            from inl.spec.kernel import Kernel

            valid = isinstance(kernels, Kernel)
            if not valid and isinstance(kernels, (list, tuple)):
                valid = all(isinstance(kernel, Kernel) for kernel in kernels)
            where = f"kernels for {device_type}"
            _check_target(where, kernels, valid, "a Kernel or a list of them")
            self.kernels.setdefault(device_type, []).append(kernels)

        return register

    def register_model(self, architecture: str, model: str | Model | Encoder) -> None:
        """Register the model of checkpoints whose config names ``architecture``."""
        from inl.spec.encoder import Encoder
        from inl.spec.model import Model

        named = isinstance(architecture, str)
        if not named or not architecture.replace("-", "_").isidentifier():
            raise PluginError(
                f"model: found the architecture {architecture!r:.80}, accepted: a name "
                "such as LlamaForCausalLM"
            )
        where = f"model {architecture}"
        _check_target(where, model, isinstance(model, Model | Encoder), "a Model")
        if architecture in self.models:
            raise PluginError(f"{where}: registered twice")
        self.models[architecture] = model

    def register_functions(
        self,
        framework: str,
        functions: str | Functions,
        modules: Sequence[str] = (),
    ) -> None:
        """Register functions on arrays whose classes are defined in ``modules``."""
        from inl.spec.functions import Functions

        roots = (framework, *modules)
        for name in roots:
            if not isinstance(name, str) or not name.isidentifier():
                raise PluginError(
                    f"functions: found {name!r:.80}, accepted: names of a framework "
                    "and of top-level modules, such as torch"
                )
        where = f"functions for {framework}"
        valid = isinstance(functions, Functions)
        _check_target(where, functions, valid, "Functions")
        if framework in self.functions:
            raise PluginError(f"{where}: registered twice")
        self.functions[framework] = FunctionsEntry(
            functions, tuple(modules) or (framework,)
        )

    def register_place(
        self,
        scheme: str,
        start: str | Callable[..., Any],
        devices: str | Callable[..., Any] | None = None,
    ) -> None:
        """Register what starts workers for devices of ``SCHEME:.../DEVICE``."""
        _check_name("place", scheme, SCHEME, "a scheme such as ray")
        where = f"place {scheme}"
        _check_target(where, start, callable(start), "a function")
        if devices is not None:
            _check_target(f"{where}: devices", devices, callable(devices), "a function")
        if scheme in self.places:
            raise PluginError(f"{where}: registered twice")
        self.places[scheme] = PlaceEntry(start, devices)

    def register_format(self, suffix: str, reader: str | Callable[..., Any]) -> None:
        """Register the reader of files and folders whose names end with ``suffix``."""
        _check_name("format", suffix, SUFFIX, "a suffix such as .npz")
        where = f"format {suffix}"
        if suffix in OWN_SUFFIXES:
            raise PluginError(f"{where}: read by inl-core; accepted: another suffix")
        _add(self.formats, where, suffix, reader)

    def register_drafter(self, name: str, drafter: str | Callable[..., Any]) -> None:
        """Register a drafter for ``EngineConfig(speculation=name)``."""
        _check_name("drafter", name, WORD, "a name such as suffix_tree")
        where = f"drafter {name}"
        if name in (AUTOMATIC, "none", *OWN_DRAFTERS):
            raise PluginError(f"{where}: part of inl-core; accepted: another name")
        _add(self.drafters, where, name, drafter)

    def register_router(self, name: str, router: str | Callable[..., Any]) -> None:
        """Register a router for ``inl serve --router NAME``."""
        _check_name("router", name, WORD, "a name such as by_client")
        _add(self.routers, f"router {name}", name, router)

    def register_transport(
        self, name: str, transport: str | Callable[..., Any]
    ) -> None:
        """Register a transport for ``EngineConfig(kv_transport=name)``."""
        _check_name("transport", name, WORD, "a name such as nixl")
        _add(self.transports, f"transport {name}", name, transport)

    def register_store(self, name: str, store: str | Callable[..., Any]) -> None:
        """Register a store for ``EngineConfig(kv_store="NAME:ADDRESS")``."""
        _check_name("store", name, WORD, "a name such as mooncake")
        _add(self.stores, f"store {name}", name, store)

    def register_command(
        self, name: str, command: str | Callable[..., Any], summary: str
    ) -> None:
        """Register the command ``inl NAME``."""
        accepted = f"a word such as fine-tune, of at most {MAX_COMMAND} letters"
        _check_name("command", name, COMMAND, accepted, MAX_COMMAND)
        where = f"command {name}"
        is_line = isinstance(summary, str) and summary.isprintable()
        if not is_line or not summary.strip() or len(summary) > MAX_SUMMARY:
            raise PluginError(
                f"{where}: summary: found {summary!r:.120}, accepted: one line of at "
                f"most {MAX_SUMMARY} letters"
            )
        _check_target(where, command, callable(command), "a function")
        if name in self.commands:
            raise PluginError(f"{where}: registered twice")
        self.commands[name] = CommandEntry(command, summary)


def _check_name(
    what: str, name: object, pattern: re.Pattern[str], accepted: str, most: int = 120
) -> None:
    valid = isinstance(name, str) and pattern.fullmatch(name) and len(name) <= most
    if not valid:
        raise PluginError(f"{what}: found {name!r:.80}, accepted: {accepted}")


def _add(
    items: dict[str, str | Callable[..., Any]],
    where: str,
    name: str,
    item: str | Callable[..., Any],
) -> None:
    """Add a function, or the name of one."""
    _check_target(where, item, callable(item), "a function")
    if name in items:
        raise PluginError(f"{where}: registered twice")
    items[name] = item


def _check_target(where: str, item: object, valid: bool, kind: str) -> None:
    """Raise unless ``item`` is ``valid`` or names an attribute of a module."""
    named = isinstance(item, str) and TARGET.fullmatch(item)
    if not valid and not named:
        raise PluginError(
            f"{where}: found {item!r:.80}, accepted: a string 'module:attribute' "
            f"or {kind}"
        )


def resolve(origin: Origin, where: str, item: Any) -> Any:
    """Import ``item`` if it is a ``"module:attribute"`` string, else return it.

    Raises :class:`~inl.errors.PluginError` with the plugin and the reason.
    """
    if not isinstance(item, str):
        return item
    module, _, path = item.partition(":")

    def load() -> Any:
        target: Any = import_module(module)
        for name in path.split("."):
            target = getattr(target, name)
        return target

    try:
        return guarded(load)
    except PluginError as error:
        raise PluginError(
            f"{origin}: cannot load {where}, {item}: {error}"
        ) from error.__cause__


def guarded(call: Callable[[], T]) -> T:
    """Call plugin code and convert any exception to a one-line PluginError.

    The message is ``Type: message``; that of a PluginError stays as it is.
    KeyboardInterrupt passes through.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except PluginError as error:
        raise PluginError(one_line(error)) from error
    except BaseException as error:
        raise PluginError(describe(error)) from error


def describe(error: BaseException) -> str:
    """Return ``Type: message`` in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks, cut to 400 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be shown)"
    return text if len(text) <= 400 else f"{text[:400]}..."
