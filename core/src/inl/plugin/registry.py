"""What all plugins together offer, and who gave each item."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from inl.device import Device, DeviceInfo, DeviceType
from inl.errors import PluginError
from inl.plugin.contribution import BackendEntry, Contribution, resolve
from inl.plugin.discover import Origin
from inl.plugin.kernels import import_kernels
from inl.plugin.probe import Found, ask

if TYPE_CHECKING:
    from inl.spec.functions import Functions
    from inl.spec.kernel import Kernel
    from inl.spec.model import Model

PACKAGES = {
    DeviceType.CPU: "inl-cpu",
    DeviceType.CUDA: "inl-cuda",
    DeviceType.ROCM: "inl-rocm",
    DeviceType.XPU: "inl-intel",
    DeviceType.DIRECTML: "inl-directml",
    DeviceType.TPU: "inl-tpu",
}
"""Distribution that serves each well-known device type."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin after loading."""

    origin: Origin
    offer: Contribution
    claims: tuple[DeviceType, ...]
    """Device types that it registered, also if it failed afterwards."""
    status: str
    """"loaded", "broken" or "unsupported"."""
    detail: str

    def serves(self, kind: DeviceType) -> bool:
        """Say whether a user who asks for ``kind`` most likely means this plugin."""
        name, distribution = self.origin.name, self.origin.distribution or ""
        spellings = name, f"inl-{name}", re.sub("[-_.]+", "-", distribution).lower()
        usual = PACKAGES.get(kind, f"inl-{kind}")
        return kind in self.claims or kind in spellings or usual in spellings


class PluginRow(NamedTuple):
    """One line of ``inl plugins``."""

    name: str
    distribution: str | None
    version: str | None
    source: str
    status: str
    """"ready", "broken", "unsupported" or "unavailable"."""
    detail: str

    @property
    def package(self) -> str:
        """Distribution and version, with how it was found where that is unusual."""
        if self.distribution is None:
            return self.source
        package = f"{self.distribution} {self.version or '(no version)'}"
        return f"{package} (builtin)" if self.source == "builtin" else package


class DeviceRow(NamedTuple):
    """One device, or a device type that is served but not there."""

    type: DeviceType
    info: DeviceInfo | None
    reason: str | None
    origin: Origin


class Registry:
    """All plugins. Probes run once, when first asked about; imports happen on use."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self._plugins = tuple(plugins)
        self._backends = {
            kind: entry
            for plugin in plugins
            for kind, entry in plugin.offer.backends.items()
        }
        self._models = {
            name: (plugin.origin, target)
            for plugin in plugins
            for name, target in plugin.offer.models.items()
        }
        self._functions = {
            name: (plugin.origin, entry)
            for plugin in plugins
            for name, entry in plugin.offer.functions.items()
        }
        self._found: dict[DeviceType, Found] = {}

    @property
    def plugins(self) -> tuple[PluginRow, ...]:
        """One row per plugin, the core's own first; probes every device type."""
        return tuple(self._row(plugin) for plugin in self._plugins)

    @property
    def failed(self) -> tuple[Plugin, ...]:
        """Plugins of which nothing is used, broken or unsupported."""
        return tuple(item for item in self._plugins if item.status != "loaded")

    @property
    def types(self) -> tuple[DeviceType, ...]:
        """Device types that have a backend, sorted."""
        return tuple(sorted(self._backends))

    def backend(self, device_type: str) -> BackendEntry | None:
        """Look up who serves ``device_type``; imports nothing."""
        return self._backends.get(DeviceType(device_type))

    def devices(self) -> tuple[DeviceRow, ...]:
        """Every device, and each device type that is served but has none, with why."""
        return tuple(row for kind in self.types for row in self._device_rows(kind))

    def find(self, device_type: str) -> Found:
        """Ask the probe of ``device_type``, once."""
        kind = DeviceType(device_type)
        if kind not in self._backends:
            absent = f"no backend for {kind} is installed; {self.advice(kind)}"
            return Found((), self.why_absent(kind) or absent)
        if kind not in self._found:
            self._found[kind] = ask(self._backends[kind])
        return self._found[kind]

    def why_not(self, device: Device) -> str | None:
        """Return ``None`` if ``device`` can be used, else the reason as a sentence."""
        kind = device.type
        found = self.find(kind)
        if found.reason is not None:
            return found.reason
        if all(info.index != device.index for info in found.devices):
            there = ", ".join(f"{kind}:{info.index}" for info in found.devices)
            return f"not among the devices found: {there}"
        return None

    def why_absent(self, kind: DeviceType) -> str | None:
        """Say what is wrong with the plugin that should serve ``kind``, if any is."""
        for plugin in self.failed:
            if plugin.serves(kind):
                return f"{plugin.origin} is {plugin.status}: {plugin.detail}"
        return None

    def advice(self, kind: DeviceType) -> str:
        """What a user may do where nobody serves ``kind``."""
        if kind in PACKAGES:
            return f"try: pip install {PACKAGES[kind]}"
        accepted = ", ".join(sorted({*PACKAGES, *self.types}))
        return f"accepted: {accepted}, or a type that an installed plugin serves"

    def kernels(self, device_type: str) -> tuple[Kernel, ...]:
        """Import the kernels that plugins add to one device type's own.

        Raises :class:`~inl.errors.PluginError` for one that is not a kernel, is for an
        op that is not in the catalog, or has the label of another.
        """
        kind = DeviceType(device_type)
        found: dict[str, tuple[Origin, Kernel]] = {}
        for plugin in self._plugins:
            for kernel in import_kernels(plugin.offer, kind):
                if kernel.label in found:
                    raise PluginError(
                        f"{plugin.origin}: kernel {kernel.label} for {kind} is already "
                        f"registered by {found[kernel.label][0]}"
                    )
                found[kernel.label] = plugin.origin, kernel
        return tuple(kernel for _, kernel in found.values())

    def models(self) -> Mapping[str, Origin]:
        """Registered architectures and who gave each."""
        return {name: origin for name, (origin, _) in self._models.items()}

    def model(self, architecture: str) -> Model | None:
        """Import the model of one architecture; ``None`` where nobody registered it.

        Raises :class:`~inl.errors.PluginError` if it cannot be imported.
        """
        from inl.spec.model import Model

        if architecture not in self._models:
            return None
        origin, target = self._models[architecture]
        found = resolve(origin, f"model {architecture}", target)
        if not isinstance(found, Model):
            raise PluginError(
                f"{origin}: model {architecture}, {target}: found "
                f"{type(found).__name__}, accepted: a Model"
            )
        return found

    def frameworks(self) -> Mapping[str, str]:
        """Modules that define arrays, by first name, and the framework of each."""
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
        found = resolve(origin, f"functions for {framework}", entry.functions)
        if not isinstance(found, Functions):
            raise PluginError(
                f"{origin}: functions for {framework}, {entry.functions}: found "
                f"{type(found).__name__}, accepted: Functions"
            )
        return found

    def _device_rows(self, kind: DeviceType) -> Iterator[DeviceRow]:
        origin = self._backends[kind].origin
        found = self.find(kind)
        for info in found.devices:
            yield DeviceRow(kind, info, None, origin)
        if found.reason is not None:
            yield DeviceRow(kind, None, found.reason, origin)

    def _row(self, plugin: Plugin) -> PluginRow:
        status, detail = plugin.status, plugin.detail
        if status == "loaded":
            status, detail = self._state(plugin.offer)
        origin = plugin.origin
        return PluginRow(
            origin.name,
            origin.distribution,
            origin.version,
            origin.source,
            status,
            detail,
        )

    def _state(self, offer: Contribution) -> tuple[str, str]:
        found = {kind: self.find(kind) for kind in offer.backends}
        devices = sum(len(item.devices) for item in found.values())
        kernels = [kind for kind, items in offer.kernels.items() if items]
        given = [_count(devices, "device")] if devices else []
        given += sorted({i.note for f in found.values() for i in f.devices if i.note})
        given += [f"kernels for {', '.join(sorted(kernels))}"] if kernels else []
        given += [_count(len(offer.models), "model name")] if offer.models else []
        functions = sorted(offer.functions)
        if functions and not given:
            given = [f"functions for {', '.join(functions)}"]
        given += [
            f"{kind}: {item.reason}" for kind, item in found.items() if item.reason
        ]
        if any(item.broken for item in found.values()):
            return "broken", "; ".join(given)
        absent = found and not devices
        detail = "; ".join(given) or "nothing for the devices here"
        return "unavailable" if absent else "ready", detail


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
