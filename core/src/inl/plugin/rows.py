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

TORCH_INDEX = "https://download.pytorch.org/whl"

INSTALL = {
    DeviceType.CPU: "pip install inl-cpu",
    DeviceType.CUDA: "pip install inl-cuda",
    DeviceType.ROCM: f"pip install torch --index-url {TORCH_INDEX}/rocm7.1 && "
    "pip install inl-rocm",
    DeviceType.XPU: f"pip install torch --index-url {TORCH_INDEX}/xpu && "
    "pip install inl-intel",
    DeviceType.DIRECTML: "pip install 'inl-directml[dml]'",
    DeviceType.TPU: "pip install 'inl-tpu[tpu]'",
}
"""Command that installs the distribution with the framework that it computes with."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin after loading."""

    origin: Origin
    items: Contribution
    """Registered items; empty unless the status is "loaded"."""
    claims: tuple[DeviceType, ...]
    """Device types that it registered, even if it failed afterwards."""
    status: str
    """"loaded", "broken", "conflict" or "unsupported"."""
    detail: str

    def serves(self, kind: DeviceType) -> bool:
        """Return whether this plugin is, by claim or by name, the one for ``kind``."""
        return kind in self.claims or is_named_for(self.origin, kind)


def is_named_for(origin: Origin, kind: str) -> bool:
    """Return whether a plugin has the usual name of the one for ``kind``."""
    name, distribution = origin.name, origin.distribution or ""
    spellings = name, f"inl-{name}", re.sub("[-_.]+", "-", distribution).lower()
    usual = PACKAGES.get(DeviceType(kind), f"inl-{kind}")
    return kind in spellings or usual in spellings


def conflict(kind: DeviceType, used: Origin, other: Origin) -> str:
    """Return a sentence about two plugins that serve one device type."""
    return (
        f"{kind} is served by {used}, which is used, and by {other}; to keep one: "
        f"{uninstalling(used)}, or: {uninstalling(other)}"
    )


def uninstalling(origin: Origin) -> str:
    """Return the line that removes a plugin."""
    if origin.distribution is None:
        return f"remove {origin.module} from INL_PLUGINS"
    return f"pip uninstall {origin.distribution}"


class PluginRow(NamedTuple):
    """One line of ``inl plugins``."""

    name: str
    distribution: str | None
    version: str | None
    source: str
    status: str
    """"ready", "broken", "conflict", "unsupported" or "unavailable"."""
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
