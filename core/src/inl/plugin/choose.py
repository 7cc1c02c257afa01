"""From the name of a device to its backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from inl.device import Device, DeviceType
from inl.errors import BackendNotFound, BackendUnavailable, InlError, PluginError
from inl.plugin.contribution import BackendEntry, describe, resolve
from inl.plugin.loader import registry
from inl.plugin.registry import Registry

if TYPE_CHECKING:
    from inl.backend.base import Backend

FIRST = (
    DeviceType.CUDA,
    DeviceType.ROCM,
    DeviceType.XPU,
    DeviceType.TPU,
    DeviceType.DIRECTML,
)
"""What "auto" prefers; then other plugins' types by name, then the CPU."""


def make_backend(device: Device | str, known: Registry | None = None) -> Backend:
    """Import and open the backend of ``device``; "auto" is :func:`choose_device`'s.

    A device that was named is never replaced by another. Raises
    :class:`~inl.errors.BackendNotFound` where no plugin serves its type, and
    :class:`~inl.errors.BackendUnavailable` where one does but cannot, with its reason.
    """
    known = known or registry()
    device = check_device(device, known)
    entry = known.backend(device.type)
    assert entry is not None, "a checked device is served"
    return _open(entry, device)


def check_device(device: Device | str, known: Registry | None = None) -> Device:
    """Resolve a name and raise what :func:`make_backend` would; imports no framework.

    For asking before something long is done for a device that is not there.
    """
    known = known or registry()
    device = choose_device(device, known)
    if known.backend(device.type) is None:
        raise _not_served(device.type, known)
    if reason := known.why_not(device):
        raise BackendUnavailable(f"{device}: {reason}")
    return device


def choose_device(
    wanted: Device | str = "auto", known: Registry | None = None
) -> Device:
    """Resolve a name; "auto" takes the first device that is there.

    What was passed over is said once, on the logger "inl": INFO for a device that is
    not there, WARNING for a plugin that is broken. It never takes ``reference``:
    raises :class:`~inl.errors.BackendNotFound` instead.
    """
    if wanted != "auto":
        return wanted if isinstance(wanted, Device) else Device(wanted)
    known = known or registry()
    passed: list[str] = []
    for kind in _order(known):
        found = known.find(kind)
        if found.devices:
            chosen = Device(kind, min(info.index for info in found.devices))
            _say(chosen, passed, known)
            return chosen
        passed.append(f"{kind}: {found.reason}")
    absent = "; ".join(passed + _failures(known))
    raise BackendNotFound(
        f"no device for auto{f' ({absent})' if absent else ''}; installed: "
        f"{', '.join(known.types)}. try: pip install inl-cpu, or ask for reference "
        "(NumPy, slow)"
    )


def _order(known: Registry) -> list[DeviceType]:
    last = (*FIRST, DeviceType.CPU, DeviceType.REFERENCE)
    others = [kind for kind in known.types if kind not in last]
    wanted = [*FIRST, *others, DeviceType.CPU]
    return [kind for kind in wanted if kind in known.types]


def _failures(known: Registry) -> list[str]:
    return [f"{plugin.origin.name}: {plugin.detail}" for plugin in known.failed]


def _say(chosen: Device, passed: list[str], known: Registry) -> None:
    failures = _failures(known)
    reasons = "; ".join(passed + failures)
    message = f"using {chosen}{f' ({reasons})' if reasons else ''}"
    level = logging.INFO if passed else logging.DEBUG
    _log(logging.WARNING if failures else level, message)


@cache
def _log(level: int, message: str) -> None:
    """Log each message once in the life of the process."""
    logging.getLogger("inl").log(level, message)


def _not_served(kind: DeviceType, known: Registry) -> InlError:
    if reason := known.why_absent(kind):
        return BackendUnavailable(f"{kind}: {reason}")
    return BackendNotFound(
        f"no backend for {kind}; installed: {', '.join(known.types)}. "
        f"{known.advice(kind)}"
    )


def _open(entry: BackendEntry, device: Device) -> Backend:
    from inl.backend.base import Backend

    try:
        make: Callable[[Device], Any] = resolve(
            entry.origin, f"backend of {device.type}", entry.backend
        )
    except PluginError as error:
        raise BackendUnavailable(f"{device}: {error}") from error.__cause__
    try:
        backend = make(device)
    except (InlError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BackendUnavailable(
            f"{device}: {entry.origin}: {describe(error)}"
        ) from error
    if not isinstance(backend, Backend):
        raise BackendUnavailable(
            f"{device}: {entry.origin}: {entry.backend!r:.80} gave "
            f"{type(backend).__name__}, accepted: a Backend"
        )
    return backend
