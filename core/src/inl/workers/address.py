"""Device names of the form ``worker:PATH_TO_PYTHON/cpu:0``."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from inl.device import Device
from inl.errors import DeviceError

SCHEME = "worker:"
ACCEPTED = (
    "accepted: worker:PATH_TO_PYTHON/DEVICE such as worker:.venv-tpu/bin/python/tpu:0"
)


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A device as another interpreter sees it."""

    python: str
    """Absolute path of the interpreter; its links are kept, since a virtual
    environment is found by them."""
    device: str
    """"auto" or the name of a device there."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.python}/{self.device}"


def parse_worker(name: str | Device) -> WorkerAddress | None:
    """Read a worker's device name; ``None`` for one that names no worker.

    The path ends at the last "/". It may be relative, hold spaces or begin with "~";
    without any "/" it is looked up as a command is. Raises
    :class:`~inl.errors.DeviceError` for a path that is no program, or a bad device.
    """
    if not isinstance(name, str) or not name.startswith(SCHEME):
        return None
    path, slash, device = name.removeprefix(SCHEME).rpartition("/")
    if not slash or not path or not device:
        raise DeviceError(f"device: found {name!r:.200}, {ACCEPTED}")
    python = _program(path, name)
    if device != "auto":
        device = str(Device(device))
    return WorkerAddress(python, device)


def _program(path: str, name: str) -> str:
    if "\0" in path:
        raise DeviceError(f"device: found {name!r:.200}, {ACCEPTED}")
    # Not Path: it resolves or drops what a virtual environment's link needs.
    found = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
    if "/" not in path:
        found = shutil.which(path) or found
    if os.path.isdir(found):  # noqa: PTH112
        why = "is a folder, not an interpreter"
    elif not os.path.exists(found):  # noqa: PTH110
        why = "does not exist"
    elif not os.access(found, os.X_OK):
        why = "may not be executed"
    else:
        return found
    raise DeviceError(f"device {name!r:.200}: {found} {why}; {ACCEPTED}")
