"""Loaded plugins, and the rows of ``inl plugins`` and ``inl devices``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from inl.device import DeviceInfo, DeviceType
from inl.install_command import install_command, pip_command
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

EXTRAS = {DeviceType.DIRECTML: "[dml]", DeviceType.TPU: "[tpu]"}
"""Extra of the distribution that installs the framework that it computes with."""

TORCH_INDEXES = {
    DeviceType.ROCM: "https://download.pytorch.org/whl/rocm7.1",
    DeviceType.XPU: "https://download.pytorch.org/whl/xpu",
}
"""Index of the build of torch that it computes with, if that is not PyPI."""


def install_line(kind: DeviceType) -> str:
    """Return the command that installs the backend of a well-known device type."""
    command = install_command(PACKAGES[kind] + EXTRAS.get(kind, ""))
    if index := TORCH_INDEXES.get(kind):
        command = f"{install_command('torch')} --index-url {index} && {command}"
    return command


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
    return f"{pip_command('uninstall')} {origin.distribution}"


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
