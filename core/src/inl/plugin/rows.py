"""Loaded plugins, and the rows of ``inl plugins`` and ``inl devices``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from inl.device import DeviceInfo, DeviceType
from inl.plugin.contribution import Contribution
from inl.plugin.discover import Origin

PACKAGES = {
    DeviceType.CPU: "inl-cpu",
    DeviceType.CUDA: "inl-cuda",
    DeviceType.ROCM: "inl-rocm",
    DeviceType.XPU: "inl-intel",
    DeviceType.DIRECTML: "inl-directml",
    DeviceType.TPU: "inl-tpu",
}
"""Distribution that provides each well-known device type."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin after loading."""

    origin: Origin
    items: Contribution
    """Registered items; empty unless the status is "loaded"."""
    claims: tuple[DeviceType, ...]
    """Device types that it registered, even if it failed afterwards."""
    status: str
    """"loaded", "broken" or "unsupported"."""
    detail: str

    def serves(self, kind: DeviceType) -> bool:
        """Return whether this plugin is, by claim or by name, the one for ``kind``."""
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
        """Distribution and version; the source for a module of INL_PLUGINS."""
        if self.distribution is None:
            return self.source
        package = f"{self.distribution} {self.version or '(no version)'}"
        return f"{package} (builtin)" if self.source == "builtin" else package


class DeviceRow(NamedTuple):
    """One device, or a device type without one and the reason why."""

    type: DeviceType
    info: DeviceInfo | None
    reason: str | None
    origin: Origin
