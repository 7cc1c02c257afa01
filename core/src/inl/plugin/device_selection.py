"""Device selection: resolves a device name and opens its backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.device import Device, DeviceInfo, DeviceType
from inl.errors import BackendNotFound, BackendUnavailable, InlError, PluginError
from inl.plugin.contract_v1 import adapted
from inl.plugin.contribution import BackendEntry, describe, resolve
from inl.plugin.hooks import CONTRACT
from inl.plugin.loader import registry, registry_for
from inl.plugin.registry import Registry
from inl.plugin.speed import Speed, speed_of

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.backend.collectives import Rank
    from inl.placement.placement import Placement

PREFERRED = (
    DeviceType.CUDA,
    DeviceType.ROCM,
    DeviceType.XPU,
    DeviceType.TPU,
    DeviceType.DIRECTML,
)
"""Order of "auto"; then other plugins' types by name, then the CPU. A device that is
less than half as fast as another one is not selected."""


def make_backend(device: Device | str, known: Registry | None = None) -> Backend:
    """Import and open the backend of ``device``; :func:`choose_device` resolves "auto".

    A named device is never replaced by another. Raises
    :class:`~inl.errors.BackendNotFound` if no plugin serves its type, and
    :class:`~inl.errors.BackendUnavailable` with the reason if the device or its
    backend cannot be used.
    """
    device = check_device(device, known)
    known = known or registry_for(device.type)
    entry = known.backend(device.type)
    assert entry is not None, "a checked device is served"
    if text := known.conflict(device.type):
        _log(logging.WARNING, text)
    return _open(entry, device, "backend", entry.backend)


def open_host(
    device: Device | str,
    placement: Placement,
    rank: Rank,
    known: Registry | None = None,
) -> Backend:
    """Open the devices of this host, as those of a rank, in a mesh over several.

    device: the first one here. Blocks until all hosts have joined. Raises the errors of
    :func:`make_backend`, and :class:`~inl.errors.BackendUnavailable` for a device that
    has no such meshes.
    """
    device = check_device(device, known)
    entry = host_entry(device, placement, known)
    return _open(entry, device, "hosts", entry.hosts, placement, rank)


def host_entry(
    device: Device, placement: Placement, known: Registry | None = None
) -> BackendEntry:
    """Return the backend of a device that has meshes over several hosts.

    Raises :class:`~inl.errors.BackendUnavailable` for any other device.
    """
    entry = (known or registry_for(device.type)).backend(device.type)
    if entry is None or entry.hosts is None:
        raise BackendUnavailable(
            f"{device}: placement {placement}: found hosts={placement.hosts}; "
            "accepted: none on this device, whose models are divided among processes "
            "on any host"
        )
    return entry


def check_device(device: Device | str, known: Registry | None = None) -> Device:
    """Resolve a device name and check that it is available; imports no framework.

    Raises the errors of :func:`make_backend`, before long work for the device starts.
    """
    device = choose_device(device, known)
    known = known or registry_for(device.type)
    if known.backend(device.type) is None:
        raise _not_served(device.type, known)
    if reason := known.why_not(device):
        raise BackendUnavailable(f"{device}: {reason}")
    return device


def choose_device(
    device: Device | str = "auto", known: Registry | None = None
) -> Device:
    """Resolve a device name; "auto" selects an available device by type and speed.

    Skipped types are logged once on the logger "inl": at INFO if their devices are
    unavailable, at WARNING if a plugin is broken. "auto" never selects ``reference``;
    it raises :class:`~inl.errors.BackendNotFound` instead.
    """
    if device != "auto":
        return device if isinstance(device, Device) else Device(device)
    return choose_auto(known or registry()).device


class AutoChoice(NamedTuple):
    """The device that "auto" selects, and why."""

    device: Device
    speeds: tuple[Speed, ...]
    """Of the first device of each available type; empty if there is one type."""
    skipped: tuple[str, ...]
    """Unavailable types, with the reason."""

    def why(self) -> str:
        """Return the reason in one sentence."""
        if not self.speeds:
            return f"auto selects {self.device}: no other device type is available"
        shown = ", ".join(map(str, self.speeds))
        return (
            f"auto selects {self.device}: the first in order that is at least "
            f"half as fast as the fastest ({shown})"
        )


def choose_auto(known: Registry) -> AutoChoice:
    """Select a device for "auto": preferred types first, unless they are slow.

    Compares speeds if several types are available; one that is not known is measured,
    see :mod:`inl.plugin.speed`. Raises and logs as :func:`choose_device`.
    """
    skipped: list[str] = []
    found: dict[Device, DeviceInfo] = {}
    for kind in _auto_order(known):
        result = known.find(kind)
        if result.devices:
            info = min(result.devices, key=lambda info: info.index)
            found[Device(kind, info.index)] = info
        else:
            skipped.append(f"{kind}: {result.reason}")
    if not found:
        absent = "; ".join(skipped + _failures(known))
        # The reason of an installed CPU backend says what to do.
        installed = known.backend(DeviceType.CPU) is not None
        advice = "" if installed else f"{known.advice(DeviceType.CPU)}, or "
        raise BackendNotFound(
            f"no device for auto{f' ({absent})' if absent else ''}; installed: "
            f"{', '.join(known.types)}. {advice}ask for reference (NumPy, slow)"
        )
    speeds = _speeds(found, known) if len(found) > 1 else ()
    fastest = max((speed.weights_per_second for speed in speeds), default=0)
    fast = [s.device for s in speeds if s.weights_per_second * 2 >= fastest]
    choice = AutoChoice(next(iter(fast or found)), speeds, tuple(skipped))
    slower = [str(s) for s in speeds if s.device not in fast]
    if choice.device != next(iter(found)):
        skipped += [f"slower: {', '.join(slower)}"]
    _log_choice(choice.device, skipped, known)
    return choice


def _speeds(found: Mapping[Device, DeviceInfo], known: Registry) -> tuple[Speed, ...]:
    speeds = []
    for device, info in found.items():
        entry = known.backend(device.type)
        assert entry is not None, "a device that was found is served"
        make = partial(_open, entry, what="backend", item=entry.backend)
        speeds.append(speed_of(device, info, entry.origin, make))
    return tuple(speeds)


def _auto_order(known: Registry) -> list[DeviceType]:
    well_known = (*PREFERRED, DeviceType.CPU, DeviceType.REFERENCE)
    others = [kind for kind in known.types if kind not in well_known]
    order = [*PREFERRED, *others, DeviceType.CPU]
    return [kind for kind in order if kind in known.types]


def _failures(known: Registry) -> list[str]:
    return [f"{plugin.origin.name}: {plugin.detail}" for plugin in known.failed]


def _log_choice(device: Device, skipped: list[str], known: Registry) -> None:
    failures = _failures(known)
    reasons = "; ".join(skipped + failures)
    message = f"using {device}{f' ({reasons})' if reasons else ''}"
    level = logging.INFO if skipped else logging.DEBUG
    _log(logging.WARNING if failures else level, message)


@cache
def _log(level: int, message: str) -> None:
    """Log a message once per process."""
    logging.getLogger("inl").log(level, message)


def _not_served(kind: DeviceType, known: Registry) -> InlError:
    if reason := known.why_absent(kind):
        return BackendUnavailable(f"{kind}: {reason}")
    return BackendNotFound(
        f"no backend for {kind}; installed: {', '.join(known.types)}. "
        f"{known.advice(kind)}"
    )


def _open(
    entry: BackendEntry, device: Device, what: str, item: object, *more: Any
) -> Backend:
    """Call what a plugin has registered with the device and more."""
    from inl.backend.base import Backend

    try:
        make: Callable[..., Any] = resolve(
            entry.origin, f"{what} of {device.type}", item
        )
    except PluginError as error:
        raise BackendUnavailable(f"{device}: {error}") from error.__cause__
    try:
        backend = make(device, *more)
    except (InlError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BackendUnavailable(
            f"{device}: {entry.origin}: {describe(error)}"
        ) from error
    if not isinstance(backend, Backend):
        raise BackendUnavailable(
            f"{device}: {entry.origin}: {item!r:.80} returned "
            f"{type(backend).__name__}, accepted: a Backend"
        )
    return adapted(backend) if entry.contract[0] < CONTRACT[0] else backend
