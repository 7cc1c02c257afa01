"""Plugin registry: the items of all plugins and the plugin of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inl.device import Device, DeviceType
from inl.errors import PluginError
from inl.plugin.check import dotted
from inl.plugin.contribution import (
    BackendEntry,
    CommandEntry,
    Contribution,
    PlaceEntry,
    resolve,
)
from inl.plugin.discover import Origin
from inl.plugin.environment import Settings, settings
from inl.plugin.hooks import CONTRACT
from inl.plugin.kernels import import_kernels
from inl.plugin.probe import ProbeResult, run_probe
from inl.plugin.rows import PACKAGES, DeviceRow, Plugin, PluginRow, install_line

if TYPE_CHECKING:
    from inl.spec.encoder import Encoder
    from inl.spec.functions import Functions
    from inl.spec.kernel import Kernel
    from inl.spec.model import Model


KINDS = {
    "place": "places",
    "format": "formats",
    "drafter": "drafters",
    "router": "routers",
    "transport": "transports",
    "store": "stores",
    "command": "commands",
}
"""Kinds of items that are functions by name, and the field of each."""


class Registry:
    """Items of all plugins; they are imported on use.

    Probes run on demand, once for each set of ``INL_*`` environment variables, since
    the reason of a failed probe may name a variable to set.
    """

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self._plugins = tuple(plugins)
        self._backends = {
            kind: entry
            for plugin in plugins
            for kind, entry in plugin.items.backends.items()
        }
        self._models = {
            name: (plugin.origin, target)
            for plugin in plugins
            for name, target in plugin.items.models.items()
        }
        self._functions = {
            name: (plugin.origin, entry)
            for plugin in plugins
            for name, entry in plugin.items.functions.items()
        }
        self._named = {
            kind: {
                name: (plugin.origin, item)
                for plugin in plugins
                for name, item in getattr(plugin.items, table).items()
            }
            for kind, table in KINDS.items()
        }
        self._probed: dict[tuple[DeviceType, Settings], ProbeResult] = {}

    @property
    def plugins(self) -> tuple[PluginRow, ...]:
        """One row per plugin, the built-in one first; probes every device type."""
        return tuple(self._row(plugin) for plugin in self._plugins)

    @property
    def failed(self) -> tuple[Plugin, ...]:
        """Plugins that are broken or unsupported; none of their items are used."""
        return tuple(item for item in self._plugins if item.status != "loaded")

    def claims(self, module: str) -> tuple[DeviceType, ...]:
        """Return the device types that the plugin of a module registered."""
        plugins = (p for p in self._plugins if p.origin.module == module)
        return tuple(kind for plugin in plugins for kind in plugin.claims)

    def commands(self, module: str) -> dict[str, str]:
        """Return the commands of the plugin of a module, and their summaries."""
        plugins = (p for p in self._plugins if p.origin.module == module)
        return {
            name: entry.summary
            for plugin in plugins
            for name, entry in plugin.items.commands.items()
        }

    def conflict(self, kind: DeviceType) -> str:
        """Return a sentence about other plugins that serve ``kind``, else ""."""
        rivals = (p for p in self.failed if p.status == "conflict" and kind in p.claims)
        return "; ".join(plugin.detail for plugin in rivals)

    @property
    def types(self) -> tuple[DeviceType, ...]:
        """Device types that have a backend, sorted."""
        return tuple(sorted(self._backends))

    @property
    def absent(self) -> tuple[DeviceType, ...]:
        """Well-known device types that no plugin serves, not even a failed one."""
        return tuple(
            kind
            for kind in PACKAGES
            if kind not in self._backends and self.why_absent(kind) is None
        )

    def backend(self, device_type: str) -> BackendEntry | None:
        """Return the backend entry of a device type, or ``None``; imports nothing."""
        return self._backends.get(DeviceType(device_type))

    def devices(self) -> tuple[DeviceRow, ...]:
        """One row per device, and per device type without one, with the reason."""
        return tuple(row for kind in self.types for row in self._device_rows(kind))

    def find(self, device_type: str) -> ProbeResult:
        """Return the devices of a type, from its probe."""
        kind = DeviceType(device_type)
        if kind not in self._backends:
            absent = f"no backend for {kind} is installed; {self.advice(kind)}"
            return ProbeResult((), self.why_absent(kind) or absent)
        key = kind, settings()
        if key not in self._probed:
            self._probed[key] = run_probe(self._backends[kind])
        return self._probed[key]

    def why_not(self, device: Device) -> str | None:
        """Return ``None`` if ``device`` is available, else the reason."""
        kind = device.type
        result = self.find(kind)
        if result.reason is not None:
            return result.reason
        if all(info.index != device.index for info in result.devices):
            names = ", ".join(f"{kind}:{info.index}" for info in result.devices)
            return f"not among the devices found: {names}"
        return None

    def why_absent(self, kind: DeviceType) -> str | None:
        """Return why the plugin for ``kind`` failed to load, or ``None``."""
        for plugin in self.failed:
            if plugin.serves(kind):
                return f"{plugin.origin} is {plugin.status}: {plugin.detail}"
        return None

    def advice(self, kind: DeviceType) -> str:
        """Return advice for a device type that no plugin serves."""
        if kind in PACKAGES:
            return f"try: {install_line(kind)}"
        accepted = ", ".join(sorted({*PACKAGES, *self.types}))
        return f"accepted: {accepted}, or a type that an installed plugin serves"

    def kernels(self, device_type: str) -> tuple[Kernel, ...]:
        """Import the kernels that plugins add for a device type.

        Raises :class:`~inl.errors.PluginError` for an item that is not a kernel, an
        op that is not in the catalog, or a label that is registered twice.
        """
        kind = DeviceType(device_type)
        by_label: dict[str, tuple[Origin, Kernel]] = {}
        for plugin in self._plugins:
            for kernel in import_kernels(plugin.items, kind):
                if kernel.label in by_label:
                    raise PluginError(
                        f"{plugin.origin}: kernel {kernel.label} for {kind} is already "
                        f"registered by {by_label[kernel.label][0]}"
                    )
                by_label[kernel.label] = plugin.origin, kernel
        return tuple(kernel for _, kernel in by_label.values())

    def models(self) -> Mapping[str, Origin]:
        """Registered architectures and the plugin of each."""
        return {name: origin for name, (origin, _) in self._models.items()}

    def model(self, architecture: str) -> Model | Encoder | None:
        """Import the model of an architecture; ``None`` if it is not registered.

        Raises :class:`~inl.errors.PluginError` if it cannot be imported.
        """
        from inl.spec.encoder import Encoder
        from inl.spec.model import Model

        if architecture not in self._models:
            return None
        origin, target = self._models[architecture]
        model = resolve(origin, f"model {architecture}", target)
        if not isinstance(model, Model | Encoder):
            raise PluginError(
                f"{origin}: model {architecture}, {target}: found "
                f"{type(model).__name__}, accepted: a Model or an Encoder"
            )
        return model

    def names(self, kind: str) -> Mapping[str, Origin]:
        """Registered names of a kind of :data:`KINDS`, and the plugin of each."""
        return {name: origin for name, (origin, _) in self._named[kind].items()}

    def function(self, kind: str, name: str) -> tuple[Origin, Callable[..., Any]]:
        """Import the function of a name of :meth:`names`.

        Raises :class:`~inl.errors.PluginError` if that fails.
        """
        if name not in self._named[kind]:
            raise PluginError(
                f"{kind} {name}: no plugin that works registers it; `inl plugins` "
                "lists them with their errors"
            )
        origin, item = self._named[kind][name]
        if isinstance(item, CommandEntry):
            item = item.command
        elif isinstance(item, PlaceEntry):
            item = item.start
        return origin, _function(origin, f"{kind} {name}", item)

    def place_devices(self, scheme: str) -> tuple[Origin, Callable[..., Any]]:
        """Import the function that lists the devices of a place.

        Raises :class:`~inl.errors.PluginError` if there is none, or that fails.
        """
        places = self._named["place"]
        lists = sorted(name for name, (_, each) in places.items() if each.devices)
        if scheme not in lists:
            raise PluginError(
                f"place {scheme!r:.40}: lists no devices; accepted: "
                f"{', '.join(lists) or 'none of those that are installed'}"
            )
        origin, entry = places[scheme]
        where = f"devices of place {scheme}"
        return origin, _function(origin, where, entry.devices)

    def frameworks(self) -> Mapping[str, str]:
        """Top-level modules of array classes, and the framework of each."""
        return {
            module: name
            for name, (_, entry) in self._functions.items()
            for module in entry.modules
        }

    def functions(self, framework: str) -> Functions:
        """Import the functions of a framework of :meth:`frameworks`.

        Raises :class:`~inl.errors.PluginError` if that fails.
        """
        from inl.spec.functions import Functions

        origin, entry = self._functions[framework]
        functions = resolve(origin, f"functions for {framework}", entry.functions)
        if not isinstance(functions, Functions):
            raise PluginError(
                f"{origin}: functions for {framework}, {entry.functions}: found "
                f"{type(functions).__name__}, accepted: Functions"
            )
        return functions

    def _device_rows(self, kind: DeviceType) -> Iterator[DeviceRow]:
        origin = self._backends[kind].origin
        result = self.find(kind)
        for info in result.devices:
            yield DeviceRow(kind, info, None, origin)
        if result.reason is not None:
            yield DeviceRow(kind, None, result.reason, origin)

    def _row(self, plugin: Plugin) -> PluginRow:
        status, detail = plugin.status, plugin.detail
        if status == "loaded":
            status, detail = self._summary(plugin.items)
            if plugin.items.contract[0] < CONTRACT[0]:
                told = f"contract {dotted(plugin.items.contract)}, through the adapter"
                detail = f"{told}; {detail}"
            conflicts = filter(None, map(self.conflict, plugin.items.backends))
            if text := "; ".join(conflicts):
                status, detail = "conflict", text
        origin = plugin.origin
        return PluginRow(
            origin.name,
            origin.distribution,
            origin.version,
            origin.source,
            status,
            detail,
        )

    def _summary(self, items: Contribution) -> tuple[str, str]:
        """Return the status and detail columns of a loaded plugin."""
        results = {kind: self.find(kind) for kind in items.backends}
        devices = [info for result in results.values() for info in result.devices]
        kernels = sorted(kind for kind, each in items.kernels.items() if each)
        facts = [_count(len(devices), "device")] if devices else []
        facts += sorted({info.note for info in devices if info.note})
        facts += [f"kernels for {', '.join(kernels)}"] if kernels else []
        facts += [_count(len(items.models), "model name")] if items.models else []
        facts += [
            _listed(kind, table, names)
            for kind, table in KINDS.items()
            if (names := sorted(getattr(items, table)))
        ]
        if items.functions and not facts:
            facts = [f"functions for {', '.join(sorted(items.functions))}"]
        facts += [
            f"{kind}: {each.reason}" for kind, each in results.items() if each.reason
        ]
        if any(result.broken for result in results.values()):
            return "broken", "; ".join(facts)
        unavailable = results and not devices
        detail = "; ".join(facts) or "nothing for the devices here"
        return "unavailable" if unavailable else "ready", detail


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(kind: str, kinds: str, names: Sequence[str]) -> str:
    """Return up to three names of a kind, or their number."""
    if len(names) > 3:
        return _count(len(names), kind)
    return f"{kind if len(names) == 1 else kinds} {', '.join(names)}"


def _function(origin: Origin, where: str, item: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = resolve(origin, where, item)
    if not callable(function):
        raise PluginError(
            f"{origin}: {where}, {item}: found {type(function).__name__}, accepted: a "
            "function"
        )
    return function
