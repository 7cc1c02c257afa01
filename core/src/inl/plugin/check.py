"""Plugin contract checks, run before and after a plugin's hooks."""

from __future__ import annotations

import inspect
from typing import Any

import pluggy

from inl.errors import PluginError
from inl.install_command import install_command
from inl.plugin import hooks
from inl.plugin.hooks import CONTRACT, FEATURES, GROUP


class Unsupported(PluginError):
    """The plugin is valid but needs a contract that this core does not serve."""


class Conflict(PluginError):
    """The plugin is valid, but another one serves the same device type."""


def hook_manager() -> pluggy.PluginManager:
    """Return a plugin manager with the hook specifications and no plugin."""
    manager = pluggy.PluginManager("inl")
    manager.add_hookspecs(hooks)
    return manager


def hook_callers(manager: pluggy.PluginManager | None = None) -> list[Any]:
    """Return pluggy's caller of every hook of the contract, sorted by name."""
    relay = (manager or hook_manager()).hook
    names = sorted(name for name in vars(relay) if name.startswith("inl_"))
    return [getattr(relay, name) for name in names]


def check_version(module: object) -> None:
    """Check INL_CONTRACT and INL_FEATURES of an entry module.

    Raises :class:`Unsupported` for a newer contract or an unknown feature, and
    :class:`~inl.errors.PluginError` for invalid constants.
    """
    contract = getattr(module, "INL_CONTRACT", CONTRACT)
    features = getattr(module, "INL_FEATURES", FEATURES)
    pair = isinstance(contract, tuple) and len(contract) == 2
    if not pair or not all(type(number) is int for number in contract):
        raise PluginError(
            f"INL_CONTRACT: found {contract!r:.80}, accepted: (major, minor) "
            f"such as {CONTRACT}"
        )
    is_set = isinstance(features, (set, frozenset, tuple, list))
    if not is_set or not all(isinstance(name, str) for name in features):
        raise PluginError(
            f"INL_FEATURES: found {features!r:.80}, accepted: a set of names"
        )
    if contract[0] != CONTRACT[0]:
        raise PluginError(
            f"INL_CONTRACT: found {contract}, but the entry point is in group {GROUP}; "
            f"accepted: major version {CONTRACT[0]}"
        )
    served = ".".join(map(str, CONTRACT))
    if contract > CONTRACT:
        raise Unsupported(
            f"needs contract {contract[0]}.{contract[1]}, this core serves {served}; "
            f"try: {install_command('inl-core', options='-U')}"
        )
    if unknown := sorted(set(features) - FEATURES):
        raise Unsupported(
            f"needs {', '.join(unknown)}; this core has "
            f"{', '.join(sorted(FEATURES)) or 'no features'} in contract {served}; "
            f"try: {install_command('inl-core', options='-U')}"
        )


def check_hooks(module: object, manager: pluggy.PluginManager) -> None:
    """Check the hook implementations of an entry module.

    Raises :class:`~inl.errors.PluginError` for a misspelled hook, one without
    ``@hookimpl``, one with an unknown argument, and a module without any hook.
    """
    known = {hook.name: hook for hook in hook_callers(manager)}
    implemented = 0
    for attribute in dir(module):
        options = manager.parse_hookimpl_opts(module, attribute)
        if options is None:
            if attribute in known and callable(getattr(module, attribute)):
                raise PluginError(f"{attribute}: lacks @hookimpl from inl.plugin")
            continue
        name = options["specname"] or attribute
        if name not in known:
            raise PluginError(
                f"{name} is not a hook of {GROUP}; known: {', '.join(sorted(known))}"
            )
        _check_arguments(name, getattr(module, attribute), known[name].spec.argnames)
        implemented += 1
    if not implemented:
        raise PluginError(
            f"implements no hook of {GROUP}; known: {', '.join(sorted(known))}"
        )


def _check_arguments(name: str, function: Any, accepted: tuple[str, ...]) -> None:
    plain = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in inspect.signature(function).parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in plain
        if required and parameter.name not in accepted:
            raise PluginError(
                f"{name}: found the argument {parameter.name!r}, "
                f"accepted: {', '.join(accepted)}"
            )


def check_returned(returned: list[Any]) -> None:
    """Raise PluginError for a hook that returned items instead of registering them."""
    if returned:
        raise PluginError(
            f"a hook returned {returned[0]!r:.80}; hooks call register and return None"
        )
