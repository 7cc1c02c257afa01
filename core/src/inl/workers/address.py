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
    """A Python interpreter and the name of a device in it."""

    python: str
    """Absolute path of the interpreter; symbolic links are not resolved, since Python
    locates its virtual environment by them."""
    device: str
    """"auto" or a device name."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.python}/{self.device}"


def parse_worker(name: str | Device) -> WorkerAddress | None:
    """Parse a worker's device name; ``None`` for a name of another form.

    The path ends at the last "/". It may be relative, contain spaces or begin with
    "~"; a path without "/" is searched in PATH. Raises
    :class:`~inl.errors.DeviceError` for a path that is not a program, or a bad device.
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
