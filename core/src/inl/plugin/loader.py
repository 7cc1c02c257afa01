"""Plugin loader: loads plugins one by one and isolates their failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pluggy

from inl import __version__
from inl.device import DeviceType
from inl.errors import PluginError
from inl.plugin.check import (
    Conflict,
    Unsupported,
    check_hooks,
    check_returned,
    check_version,
    hook_manager,
    unserved,
)
from inl.plugin.contribution import Contribution, guarded
from inl.plugin.discover import (
    PREFIX,
    SERVED_GROUPS,
    Origin,
    from_entry_points,
    from_modules,
    installed,
    variable,
)
from inl.plugin.printed import stdout_to_stderr
from inl.plugin.registry import KINDS, Registry
from inl.plugin.rows import Plugin, conflict, is_named_for
from inl.plugin.screening import Verdict, recall, screen

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from inl.plugin.discover import AnyPoint

STATUS: dict[type, str] = {Unsupported: "unsupported", Conflict: "conflict"}

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
            # What a plugin prints is no part of a command's output.
            with stdout_to_stderr():
                guarded(call)
        except PluginError as error:
            cause = error.__cause__
            self.status = STATUS.get(type(cause), "broken")
            self.detail = str(error)
            logging.getLogger("inl").debug("%s: %s", self.origin, error, exc_info=cause)

    def finish(self) -> Plugin:
        """Return the loaded plugin; a failed one keeps no items, only its claims."""
        claims = tuple(self.items.backends)
        items = self.items if self.status == "loaded" else Contribution(self.origin)
        return Plugin(self.origin, items, claims, self.status, self.detail)


@cache
def registry() -> Registry:
    """Return the registry of all installed plugins, loaded once per process.

    Plugins are first imported in child processes, see :mod:`inl.plugin.screening`.
    """
    origins = _origins(None, None)
    return _load(origins, screen(origins[1:]))


def registry_for(device_type: str) -> Registry:
    """Return a registry for a process that uses devices of one type only.

    Does not import, or wait for, plugins that serve other types. It is that of all
    plugins if they are loaded, or if no other plugin serves the type.
    """
    kind = DeviceType(device_type)
    if registry.cache_info().currsize or not _is_known(kind):
        return registry()
    known = _registry_of(kind)
    return known if known.backend(kind) or known.why_absent(kind) else registry()


@cache
def registered_commands() -> dict[str, tuple[Origin, str]]:
    """Return the commands that plugins add: the plugin and the summary of each.

    Imports no plugin that has been tested before; the first of two that register a
    name has it.
    """
    found: dict[str, tuple[Origin, str]] = {}
    for origin, verdict in screen(_origins(None, None)[1:]).items():
        for name, summary in (verdict.commands if verdict else {}).items():
            found.setdefault(name, (origin, summary))
    return found


def _is_known(kind: DeviceType) -> bool:
    """Return whether a plugin serves ``kind``, by its name or when it was tested."""
    return kind == DeviceType.REFERENCE or any(
        is_named_for(origin, kind)
        or ((verdict := recall(origin)) is not None and kind in verdict.backends)
        for origin in _origins(None, None)[1:]
    )


@cache
def builtin_registry() -> Registry:
    """Return the registry of the built-in plugin alone."""
    return _load([BUILTIN])


@cache
def _registry_of(kind: DeviceType) -> Registry:
    origins = _origins(None, None)
    verdicts = screen(origins[1:], kind)
    needed = [
        origin
        for origin in origins
        if origin is BUILTIN
        or ((verdict := verdicts[origin]) and verdict.relevant(kind))
        or is_named_for(origin, kind)
    ]
    return _load(needed, verdicts)


def load_registry(
    entry_points: Iterable[EntryPoint] | None = None,
    modules: Iterable[str] | None = None,
) -> Registry:
    """Load the built-in plugin, then ``entry_points``, then ``modules``.

    ``None`` stands for the installed entry points and for INL_PLUGINS. Does not raise
    for a faulty plugin; its row in :attr:`Registry.plugins` states the reason. Plugins
    are imported in this process at once.
    """
    return _load(_origins(entry_points, modules))


def _origins(
    entry_points: Iterable[AnyPoint] | None, modules: Iterable[str] | None
) -> list[Origin]:
    """Return the origins of all plugins, the built-in one first."""
    damaged: list[Origin] = []
    if entry_points is None:
        entry_points, damaged = installed()
    points = from_entry_points(entry_points)
    known = {origin.module for origin in points if origin.group in SERVED_GROUPS}
    named = from_modules(variable() if modules is None else modules)
    origins = [BUILTIN, *points, *damaged]
    origins += [origin for origin in named if origin.module not in known]
    return origins


def _load(
    origins: Iterable[Origin], verdicts: Mapping[Origin, Verdict | None] | None = None
) -> Registry:
    tested = verdicts or {}
    backends: dict[DeviceType, Origin] = {}
    models: dict[str, Origin] = {}
    frameworks: dict[str, Origin] = {}
    others: dict[str, dict[Any, Origin]] = {kind: {} for kind in KINDS}
    plugins: list[Loading] = []
    for origin in origins:
        items = Contribution(origin)
        plugin = Loading(origin, items, hook_manager())
        plugins.append(plugin)
        plugin.attempt(partial(_check_verdict, tested.get(origin)))
        plugin.attempt(partial(_import, plugin))
        plugin.attempt(partial(_register, plugin))
        plugin.attempt(partial(_claim_types, items, backends))
        plugin.attempt(partial(_claim, "model", items.models, models))
        plugin.attempt(partial(_claim, "framework", items.functions, frameworks))
        for kind, owners in others.items():
            names = getattr(items, KINDS[kind])
            plugin.attempt(partial(_claim, kind, names, owners))
        if plugin.status == "loaded":
            for kind, owners in others.items():
                owners |= dict.fromkeys(getattr(items, KINDS[kind]), origin)
            backends |= dict.fromkeys(items.backends, origin)
            models |= dict.fromkeys(items.models, origin)
            frameworks |= dict.fromkeys(items.functions, origin)
    for plugin in plugins:
        for device_type in backends:
            plugin.attempt(partial(_register_kernels, plugin, device_type))
    return Registry([plugin.finish() for plugin in plugins])


def _check_verdict(verdict: Verdict | None) -> None:
    """Raise if the plugin hangs or crashes where it is imported."""
    if verdict and verdict.reason:
        logging.getLogger("inl").debug("%s", verdict.where)
        raise PluginError(verdict.reason)


def _import(plugin: Loading) -> None:
    origin = plugin.origin
    if origin.group not in ("", *SERVED_GROUPS):
        raise unserved(origin.group.removeprefix(PREFIX))
    if origin.problem:
        raise PluginError(origin.problem)
    name, _, path = origin.module.partition(":")
    entry: Any = import_module(name)
    for part in filter(None, path.split(".")):
        entry = getattr(entry, part)
    plugin.items.contract = check_version(entry, origin.group)
    check_hooks(entry, plugin.manager)
    plugin.manager.register(entry, origin.name)


def _register(plugin: Loading) -> None:
    call = plugin.manager.hook
    items = plugin.items
    returned = call.inl_register_backends(register=items.register_backend)
    returned += call.inl_register_models(register=items.register_model)
    returned += call.inl_register_functions(register=items.register_functions)
    returned += call.inl_register_places(register=items.register_place)
    returned += call.inl_register_formats(register=items.register_format)
    returned += call.inl_register_drafters(register=items.register_drafter)
    returned += call.inl_register_routers(register=items.register_router)
    returned += call.inl_register_transports(register=items.register_transport)
    returned += call.inl_register_stores(register=items.register_store)
    returned += call.inl_register_commands(register=items.register_command)
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


def _claim_types(items: Contribution, owners: Mapping[DeviceType, Origin]) -> None:
    """Raise if another plugin serves one of the device types.

    Raises :class:`Conflict` if either can be removed.
    """
    for kind in items.backends:
        if kind in owners and owners[kind] is not BUILTIN:
            raise Conflict(conflict(kind, owners[kind], items.origin))
    _claim("device type", items.backends, dict(owners))
