"""Numbers of workers on several hosts, given by torchrun, srun or Kubernetes.

Each sets environment variables for every process that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from inl.device import Device, DeviceType
from inl.errors import DeviceError
from inl.workers.settings import MAX_SEATS

HOST_TYPES = (DeviceType.CPU, DeviceType.REFERENCE)
"""Devices that workers share: the processor of their host."""


class Launcher(NamedTuple):
    """Names of the variables of one launcher."""

    number: str
    """Number of the worker among all."""
    local: str | None = None
    """Number of the worker among those of its host; all are needed."""
    alone: bool = False
    """Whether each worker has a host, or a container, of its own."""


LAUNCHERS = (
    Launcher("TPU_WORKER_ID"),  # Cloud TPUs: the host's number in its slice
    Launcher("RANK", "LOCAL_RANK"),  # torchrun
    Launcher("SLURM_PROCID", "SLURM_LOCALID"),  # srun
    Launcher("LWS_WORKER_INDEX", alone=True),  # a LeaderWorkerSet of Kubernetes
)
"""The first whose variables are set counts: those that start others come last."""


class Launched(NamedTuple):
    """The numbers that a launcher gives to a worker."""

    number: int | None = None
    local: int | None = None
    """Which of the host's devices it computes on; ``None`` for the one that the engine
    names."""


def read_launcher(settings: Mapping[str, str]) -> Launched:
    """Return the numbers of this worker; ``None`` without a launcher.

    Raises :class:`~inl.errors.DeviceError` for anything but numbers below 65535.
    """
    for name, local, alone in LAUNCHERS:
        if name not in settings or (local is not None and local not in settings):
            continue
        if local is not None:
            return Launched(_number(settings, name), _number(settings, local))
        return Launched(_number(settings, name), 0 if alone else None)
    return Launched()


def _number(settings: Mapping[str, str], name: str) -> int:
    text = settings[name]
    if not (text.isascii() and text.isdigit() and int(text[:6]) < MAX_SEATS):
        raise DeviceError(
            f"{name}: found {text!r:.40}, accepted: the number of this worker, 0 to "
            f"{MAX_SEATS - 1}; or set --seat and --device"
        )
    return int(text)


def device_here(asked: str, local: int) -> str:
    """Return the device of the worker with the number ``local`` on its host.

    asked: the name that the engine sends, which counts the devices of all hosts. Where
    the launcher shows each worker one device, that one; processors are shared. Raises
    :class:`~inl.errors.DeviceError` for a host with fewer devices than workers.
    """
    from inl.plugin import registry

    if asked == "auto" or (kind := Device(asked).type) in HOST_TYPES:
        return asked
    found = registry().find(kind).devices
    if not found:  # opening it says why
        return asked
    if len(found) > 1 and local >= len(found):
        names = ", ".join(f"{kind}:{each.index}" for each in found)
        raise DeviceError(
            f"worker {local} of this host: found {names}; accepted: at most one worker "
            "for each device"
        )
    return str(Device(kind, found[0 if len(found) == 1 else local].index))
