"""Plugin contract checks, run before and after a plugin's hooks."""

from __future__ import annotations

import inspect
from typing import Any

import pluggy

from inl.errors import PluginError
from inl.install_command import install_command
from inl.plugin import hooks
from inl.plugin.contract_v1 import GROUP_OF_V1, LAST_OF_V1
from inl.plugin.hooks import CONTRACT, FEATURES, GROUP

Version = tuple[int, int]
"""Major and minor version of a contract."""

SERVED = {GROUP: CONTRACT, GROUP_OF_V1: LAST_OF_V1}
"""Entry-point groups that this core serves, with the newest contract of each."""

DEFAULTS = {GROUP: (CONTRACT[0], 0), GROUP_OF_V1: LAST_OF_V1}
"""Contracts of plugins without INL_CONTRACT, by group."""


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


def check_version(module: object, group: str = "") -> Version:
    """Return the contract of an entry module, from its INL_CONTRACT and its group.

    group: that of its entry point; empty for a module that is loaded by name. Raises
    :class:`Unsupported` for a contract or a feature that this core does not serve, and
    for a contract of another group; :class:`~inl.errors.PluginError` for invalid
    constants.
    """
    default = DEFAULTS[group or GROUP]
    contract = getattr(module, "INL_CONTRACT", default)
    features = getattr(module, "INL_FEATURES", ())
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
    major, minor = contract
    newest = SERVED.get(own_group := f"inl.v{major}")
    if newest is None or contract > newest:
        raise unserved(f"{major}.{minor}")
    if group and group != own_group:
        raise Unsupported(
            f"INL_CONTRACT is {contract}, but the entry point is in group {group}, of "
            f"contract {default[0]}; move it to group {own_group}"
        )
    if unknown := sorted(set(features) - FEATURES.keys()):
        raise Unsupported(
            f"needs {', '.join(unknown)}; this core has {', '.join(sorted(FEATURES))} "
            f"in contract {dotted(CONTRACT)}; "
            f"try: {install_command('inl-core', options='-U')}"
        )
    return contract


def unserved(contract: str) -> Unsupported:
    """Return the error of a contract that this core does not serve."""
    is_older = contract.partition(".")[0] == "0"
    advice = "" if is_older else f"; try: {install_command('inl-core', options='-U')}"
    return Unsupported(
        f"needs contract {contract}, this core serves {dotted(CONTRACT)} and 1.0 to "
        f"{dotted(LAST_OF_V1)}{advice}"
    )


def dotted(contract: Version) -> str:
    """Return a contract as it is shown, such as "2.0"."""
    return ".".join(map(str, contract))


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
