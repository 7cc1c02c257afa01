"""Plugin contract and plugin registry.

A plugin's entry module needs only ``hookimpl``; the host calls ``registry()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inl.plugin.device_selection import check_device as check_device
from inl.plugin.device_selection import choose_device as choose_device
from inl.plugin.device_selection import host_entry as host_entry
from inl.plugin.device_selection import make_backend as make_backend
from inl.plugin.device_selection import open_host as open_host
from inl.plugin.hooks import CONTRACT as CONTRACT
from inl.plugin.hooks import FEATURES as FEATURES
from inl.plugin.hooks import GROUP as GROUP
from inl.plugin.hooks import hookimpl as hookimpl
from inl.plugin.loader import builtin_registry as builtin_registry
from inl.plugin.loader import load_registry as load_registry
from inl.plugin.loader import registry as registry
from inl.plugin.loader import registry_for as registry_for
from inl.plugin.registry import Registry as Registry

if TYPE_CHECKING:
    from inl.backend.simple import simple_backend as simple_backend

__all__ = [
    "CONTRACT",
    "FEATURES",
    "GROUP",
    "Registry",
    "builtin_registry",
    "check_device",
    "choose_device",
    "hookimpl",
    "host_entry",
    "load_registry",
    "make_backend",
    "open_host",
    "registry",
    "registry_for",
    "simple_backend",
]


def __getattr__(name: str) -> Any:
    if name == "simple_backend":
        # Imported on access: it imports NumPy, which an entry module must not.
        from inl.backend.simple import simple_backend

        return simple_backend
    raise AttributeError(f"module 'inl.plugin' has no attribute {name!r}")
