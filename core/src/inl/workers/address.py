"""Names of devices in workers: ``worker:PATH_TO_PYTHON/cpu:0``, ``join:cuda:0``."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from inl.device import Device
from inl.errors import DeviceError
from inl.plugin import builtin_registry, registry

ACCEPTED = (
    "accepted: worker:PATH_TO_PYTHON/DEVICE such as worker:.venv-tpu/bin/python/tpu:0"
)


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker is started, and the name of a device there."""

    target: str
    """What the place is told. Of "worker:" the absolute path of an interpreter, whose
    symbolic links are not resolved, since Python locates its virtual environment by
    them."""
    device: str
    """"auto" or a device name."""
    scheme: str = "worker"
    """Name of the place."""
    devices: int = 1
    """Devices there that the worker drives: the named one and those after it."""

    def __str__(self) -> str:
        target = self.target and f"{self.target}/"
        return f"{self.scheme}:{target}{self.device}"


def parse_worker(name: str | Device) -> WorkerAddress | None:
    """Parse a worker's device name; ``None`` for the name of a device of this process.

    The path of "worker:" ends at the last "/". It may be relative, contain spaces or
    begin with "~"; a path without "/" is searched in PATH. Raises
    :class:`~inl.errors.DeviceError` for a path that is not a program, a bad device, or
    a place that no plugin registers.
    """
    if not isinstance(name, str) or ":" not in name or _is_device(name):
        return None
    scheme, _, rest = name.partition(":")
    target, slash, device = rest.rpartition("/")
    if not _is_place(scheme, bool(slash)):
        return None
    if scheme == "worker":
        if not target or not device:
            raise DeviceError(f"device: found {name!r:.200}, {ACCEPTED}")
        target = _program(target, name)
    if device != "auto":
        device = str(Device(device))
    return WorkerAddress(target, device, scheme)


def _is_device(name: str) -> bool:
    try:
        Device(name)
    except DeviceError:
        return False
    return True


def _is_place(scheme: str, has_slash: bool) -> bool:
    """Whether a plugin registers a place, which a "/" in the name means."""
    if scheme in builtin_registry().names("place"):
        return True
    names = registry().names("place")
    if has_slash and scheme not in names:
        raise DeviceError(
            f"device: found the place {scheme!r:.40}, accepted: "
            f"{', '.join(sorted(names))}, or one that an installed plugin registers"
        )
    return scheme in names


def _program(path: str, name: str) -> str:
    if "\0" in path:
        raise DeviceError(f"device: found {name!r:.200}, {ACCEPTED}")
    # Path.resolve would follow the links of a virtual environment.
    program = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
    if "/" not in path:
        program = shutil.which(path) or program
    if os.path.isdir(program):  # noqa: PTH112
        why = "is a folder, not an interpreter"
    elif not os.path.exists(program):  # noqa: PTH110
        why = "does not exist"
    elif not os.access(program, os.X_OK):
        why = "is not executable"
    else:
        return program
    raise DeviceError(f"device {name!r:.200}: {program} {why}; {ACCEPTED}")
