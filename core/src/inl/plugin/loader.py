"""Loads plugins one by one, so that a broken one is a row and nothing else."""

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
from inl.plugin.registry import Plugin, Registry

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BUILTIN = Origin("reference", "inl.plugin.builtin", "builtin", "inl-core", __version__)


@dataclass(slots=True)
class Loading:
    """A plugin on its way in."""

    origin: Origin
    offer: Contribution
    manager: pluggy.PluginManager
    status: str = "loaded"
    detail: str = ""

    def attempt(self, call: Callable[[], None]) -> None:
        """Run one stage; a failure ends the loading of this plugin only."""
        if self.status != "loaded":
            return
        try:
            guarded(call)
        except PluginError as error:
            kind = isinstance(error.__cause__, Unsupported)
            self.status = "unsupported" if kind else "broken"
            self.detail = str(error)

    def finish(self) -> Plugin:
        """Freeze it; of a plugin that failed only what it claimed to serve is kept."""
        claims = tuple(self.offer.backends)
        kept = self.offer if self.status == "loaded" else Contribution(self.origin)
        return Plugin(self.origin, kept, claims, self.status, self.detail)


@cache
def registry() -> Registry:
    """Everything that is installed, loaded once per process."""
    return load_registry()


def load_registry(
    entry_points: Iterable[EntryPoint] | None = None,
    modules: Iterable[str] | None = None,
) -> Registry:
    """Load the core's own plugin, then ``entry_points``, then ``modules``.

    ``None`` means those of the environment and of INL_PLUGINS. Never raises because
    of a plugin: what is wrong with it stands in its row.
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
        plugin = Loading(origin, Contribution(origin), hook_manager())
        plugins.append(plugin)
        plugin.attempt(partial(_import, plugin))
        plugin.attempt(partial(_register, plugin))
        plugin.attempt(partial(_claim, "device type", plugin.offer.backends, backends))
        plugin.attempt(partial(_claim, "model", plugin.offer.models, models))
        wanted = plugin.offer.functions
        plugin.attempt(partial(_claim, "framework", wanted, frameworks))
        if plugin.status == "loaded":
            backends |= dict.fromkeys(plugin.offer.backends, origin)
            models |= dict.fromkeys(plugin.offer.models, origin)
            frameworks |= dict.fromkeys(plugin.offer.functions, origin)
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
    found: Any = import_module(name)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    check_version(found)
    check_hooks(found, plugin.manager)
    plugin.manager.register(found, origin.name)


def _register(plugin: Loading) -> None:
    call = plugin.manager.hook
    offer = plugin.offer
    returned = call.inl_register_backends(register=offer.register_backend)
    returned += call.inl_register_models(register=offer.register_model)
    returned += call.inl_register_functions(register=offer.register_functions)
    check_returned(returned)


def _register_kernels(plugin: Loading, kind: DeviceType) -> None:
    register = plugin.offer.register_kernels(kind)
    call = plugin.manager.hook.inl_register_kernels
    check_returned(call(register=register, device_type=kind))


def _claim(what: str, wanted: Iterable[str], taken: dict[Any, Origin]) -> None:
    for name in wanted:
        if name in taken:
            raise PluginError(f"{what} {name} is already registered by {taken[name]}")
