"""The router of ``inl serve --router``, which a plugin registers."""

from __future__ import annotations

from inl.errors import InlError, PluginError, RequestError
from inl.fleet.plugin_router import GuardedPolicy
from inl.plugin import registry
from inl.plugin.contribution import describe


def make_plugin_router(name: str) -> GuardedPolicy:
    """Return the router that a plugin registers as ``name``.

    Raises :class:`~inl.errors.RequestError` if there is none, or it cannot be made.
    """
    names = sorted(registry().names("router"))
    if name not in names:
        raise RequestError(
            f"--router: found {name!r:.80}, accepted: the name of a plugin's router: "
            f"{', '.join(names) or 'none is installed'}"
        )
    try:
        origin, factory = registry().function("router", name)
    except PluginError as error:
        raise RequestError(f"--router {name}: {error}") from error
    where = f"{origin}: router {name}"
    try:
        policy = factory()
    except (InlError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise RequestError(f"{where} failed: {describe(error)}") from error
    if not callable(getattr(policy, "choose", None)):
        raise RequestError(
            f"{where}: found {type(policy).__name__} without choose, accepted: a Policy"
        )
    return GuardedPolicy(policy, where)
