"""Devices and their types: ``Device("cuda:1")``, ``Device(DeviceType.TPU, 0)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from inl.errors import DeviceError

MAX_INDEX = 65535
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
INDEX = re.compile(r"0|[1-9][0-9]{0,4}")


class DeviceType(str):
    """Kind of device, a string such as "cuda"; plugins may use names of their own.

    1 to 32 lower-case letters, digits and ``_``, starting with a letter. Raises
    :class:`~inl.errors.DeviceError` for anything else.
    """

    __slots__ = ()

    CPU: ClassVar[DeviceType]
    CUDA: ClassVar[DeviceType]
    ROCM: ClassVar[DeviceType]
    XPU: ClassVar[DeviceType]
    DIRECTML: ClassVar[DeviceType]
    TPU: ClassVar[DeviceType]
    REFERENCE: ClassVar[DeviceType]
    """NumPy, op by op as specified; part of the core."""

    def __new__(cls, name: str) -> DeviceType:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise DeviceError(
                f"device type: found {name!r:.80}, accepted: lower-case letters, "
                "digits and '_' such as cpu, cuda or npu"
            )
        if name == "auto":
            raise DeviceError(
                "device type: found 'auto', which is not a device; accepted: cpu, "
                "cuda, ...; inl.plugin.choose_device('auto') selects one"
            )
        return super().__new__(cls, name)

    def __repr__(self) -> str:
        return f"DeviceType({str(self)!r})"

    def __str__(self) -> str:
        return str.__str__(self)


DeviceType.CPU = DeviceType("cpu")
DeviceType.CUDA = DeviceType("cuda")
DeviceType.ROCM = DeviceType("rocm")
DeviceType.XPU = DeviceType("xpu")
DeviceType.DIRECTML = DeviceType("directml")
DeviceType.TPU = DeviceType("tpu")
DeviceType.REFERENCE = DeviceType("reference")


@dataclass(frozen=True, slots=True, init=False)
class Device:
    """One device: its type and its index among those of its type, from 0.

    ``Device("cuda:1")``, ``Device("cuda", 1)`` and ``Device(DeviceType.CUDA, 1)`` are
    equal; without an index it is 0. Raises :class:`~inl.errors.DeviceError` for a
    malformed name. The device need not exist, see :meth:`is_available`.
    """

    type: DeviceType
    index: int

    def __init__(self, name: str, index: int | None = None) -> None:
        head, colon, tail = name.partition(":") if isinstance(name, str) else ("",) * 3
        if colon and (index is not None or not _is_index(tail)):
            raise _bad_name(name, index)
        if index is not None and (
            type(index) is not int or not 0 <= index <= MAX_INDEX
        ):
            raise _bad_name(name, index)
        try:
            kind = DeviceType(head)
        except DeviceError as error:
            if head == "auto":
                raise
            raise _bad_name(name, index) from error
        object.__setattr__(self, "type", kind)
        object.__setattr__(self, "index", int(tail) if colon else index or 0)

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    def is_available(self) -> bool:
        """Return whether an installed backend can use it now."""
        return self.why_not() is None

    def why_not(self) -> str | None:
        """Return why it cannot be used, or ``None`` if it can."""
        from inl.plugin import registry_for

        return registry_for(self.type).why_not(self)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Description of one device, as a probe returns it."""

    index: int
    name: str
    """Product name, such as "NVIDIA H200"."""
    memory_bytes: int | None = None
    """Total memory; ``None`` if it is not known without importing a framework."""
    note: str = ""
    """A short remark for users, such as that a slower code path is used."""
    bytes_per_second: float | None = None
    """Approximate memory bandwidth, by which "auto" compares devices; ``None`` if it is
    not known without importing a framework, then it is measured once."""


Probe = Callable[[], Sequence[DeviceInfo]]
"""Lists the devices of one type without importing a framework.

Raises :class:`~inl.errors.BackendUnavailable`, with the reason, if there is none.
"""


def _is_index(text: str) -> bool:
    return INDEX.fullmatch(text) is not None and int(text) <= MAX_INDEX


def _bad_name(name: object, index: object) -> DeviceError:
    found = f"{name!r:.80}" if index is None else f"{name!r:.80} with index {index!r}"
    return DeviceError(
        f"device: found {found}, accepted: a lower-case type such as cpu, cuda or npu, "
        f"optionally followed by ':' and an index of 0 to {MAX_INDEX}, such as cuda:1"
    )
