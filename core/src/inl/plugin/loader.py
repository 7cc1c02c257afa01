"""Plugin loader: loads plugins one by one and isolates their failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pluggy

from inl import __version__
from inl.device import DeviceType
from inl.errors import PluginError
from inl.plugin.check import (
    Unsupported,
    check_hooks,
    check_returned,
    check_version,
    hook_manager,
)
from inl.plugin.contribution import Contribution, guarded
from inl.plugin.discover import (
    PREFIX,
    Origin,
    from_entry_points,
    from_modules,
    installed,
    variable,
)
from inl.plugin.hooks import CONTRACT, GROUP
from inl.plugin.registry import Registry
from inl.plugin.rows import Plugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BUILTIN = Origin("reference", "inl.plugin.builtin", "builtin", "inl-core", __version__)


@dataclass(slots=True)
class Loading:
    """State of a plugin while it is loaded."""

    origin: Origin
    items: Contribution
    manager: pluggy.PluginManager
    status: str = "loaded"
    detail: str = ""

    def attempt(self, call: Callable[[], None]) -> None:
        """Run one stage; a failure stops the loading of this plugin only."""
        if self.status != "loaded":
            return
        try:
            guarded(call)
        except PluginError as error:
            unsupported = isinstance(error.__cause__, Unsupported)
            self.status = "unsupported" if unsupported else "broken"
            self.detail = str(error)

    def finish(self) -> Plugin:
        """Return the loaded plugin; a failed one keeps no items, only its claims."""
        claims = tuple(self.items.backends)
        items = self.items if self.status == "loaded" else Contribution(self.origin)
        return Plugin(self.origin, items, claims, self.status, self.detail)


@cache
def registry() -> Registry:
    """Return the registry of all installed plugins, loaded once per process."""
    return load_registry()


def load_registry(
    entry_points: Iterable[EntryPoint] | None = None,
    modules: Iterable[str] | None = None,
) -> Registry:
    """Load the built-in plugin, then ``entry_points``, then ``modules``.

    ``None`` stands for the installed entry points and for INL_PLUGINS. Does not raise
    for a faulty plugin; its row in :attr:`Registry.plugins` states the reason.
    """
    damaged: list[Origin] = []
    if entry_points is None:
        entry_points, damaged = installed()
    points = from_entry_points(entry_points)
    known = {origin.module for origin in points if origin.group == GROUP}
    named = from_modules(variable() if modules is None else modules)
    origins = [BUILTIN, *points, *damaged]
    origins += [origin for origin in named if origin.module not in known]
    return _load(origins)


def _load(origins: Iterable[Origin]) -> Registry:
    backends: dict[DeviceType, Origin] = {}
    models: dict[str, Origin] = {}
    frameworks: dict[str, Origin] = {}
    plugins: list[Loading] = []
    for origin in origins:
        items = Contribution(origin)
        plugin = Loading(origin, items, hook_manager())
        plugins.append(plugin)
        plugin.attempt(partial(_import, plugin))
        plugin.attempt(partial(_register, plugin))
        plugin.attempt(partial(_claim, "device type", items.backends, backends))
        plugin.attempt(partial(_claim, "model", items.models, models))
        plugin.attempt(partial(_claim, "framework", items.functions, frameworks))
        if plugin.status == "loaded":
            backends |= dict.fromkeys(items.backends, origin)
            models |= dict.fromkeys(items.models, origin)
            frameworks |= dict.fromkeys(items.functions, origin)
    for plugin in plugins:
        for kind in backends:
            plugin.attempt(partial(_register_kernels, plugin, kind))
    return Registry([plugin.finish() for plugin in plugins])


def _import(plugin: Loading) -> None:
    origin = plugin.origin
    if origin.group != GROUP:
        needed = origin.group.removeprefix(PREFIX)
        raise Unsupported(f"needs contract {needed}, this core serves {CONTRACT[0]}")
    if origin.problem:
        raise PluginError(origin.problem)
    name, _, path = origin.module.partition(":")
    entry: Any = import_module(name)
    for part in filter(None, path.split(".")):
        entry = getattr(entry, part)
    check_version(entry)
    check_hooks(entry, plugin.manager)
    plugin.manager.register(entry, origin.name)


def _register(plugin: Loading) -> None:
    call = plugin.manager.hook
    items = plugin.items
    returned = call.inl_register_backends(register=items.register_backend)
    returned += call.inl_register_models(register=items.register_model)
    returned += call.inl_register_functions(register=items.register_functions)
    check_returned(returned)


def _register_kernels(plugin: Loading, kind: DeviceType) -> None:
    register = plugin.items.register_kernels(kind)
    call = plugin.manager.hook.inl_register_kernels
    check_returned(call(register=register, device_type=kind))


def _claim(what: str, names: Iterable[str], owners: dict[Any, Origin]) -> None:
    """Raise if another plugin has registered one of ``names``."""
    for name in names:
        if name in owners:
            raise PluginError(f"{what} {name} is already registered by {owners[name]}")
