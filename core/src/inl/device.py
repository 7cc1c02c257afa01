"""Which accelerator is meant: ``Device("cuda:1")``, ``Device(DeviceType.TPU, 0)``."""

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
    """Kind of device: an open name, so ``DeviceType("npu")`` is as good as ours.

    Lower-case letters, digits and ``_``, beginning with a letter, 32 at most.
    Raises :class:`~inl.errors.DeviceError` for anything else.
    """

    __slots__ = ()

    CPU: ClassVar[DeviceType]
    CUDA: ClassVar[DeviceType]
    ROCM: ClassVar[DeviceType]
    XPU: ClassVar[DeviceType]
    DIRECTML: ClassVar[DeviceType]
    TPU: ClassVar[DeviceType]
    REFERENCE: ClassVar[DeviceType]
    """NumPy, computed op by op as specified; ships with the core."""

    def __new__(cls, name: str) -> DeviceType:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise DeviceError(
                f"device type: found {name!r:.80}, accepted: lower-case letters, "
                "digits and '_' such as cpu, cuda or npu"
            )
        if name == "auto":
            raise DeviceError(
                "device type: found 'auto', which names no device; accepted: cpu, "
                "cuda, ...; inl.plugin.choose_device('auto') picks one"
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
    """One device: its type and which of them, counted from 0.

    ``Device("cuda:1")``, ``Device("cuda", 1)`` and ``Device(DeviceType.CUDA, 1)`` are
    equal. Raises :class:`~inl.errors.DeviceError` for a name of another form; whether
    the device exists is another question, see :meth:`why_not`.
    """

    type: DeviceType
    index: int

    def __init__(self, name: str, index: int | None = None) -> None:
        head, colon, tail = name.partition(":") if isinstance(name, str) else ("",) * 3
        if colon and (index is not None or not _is_index(tail)):
            raise _complain(name, index)
        if index is not None and (
            type(index) is not int or not 0 <= index <= MAX_INDEX
        ):
            raise _complain(name, index)
        try:
            kind = DeviceType(head)
        except DeviceError as error:
            if head == "auto":
                raise
            raise _complain(name, index) from error
        object.__setattr__(self, "type", kind)
        object.__setattr__(self, "index", int(tail) if colon else index or 0)

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    def is_available(self) -> bool:
        """Say whether an installed backend can use it now."""
        return self.why_not() is None

    def why_not(self) -> str | None:
        """Return ``None`` if it can be used, else the reason as a sentence."""
        from inl.plugin import registry

        return registry().why_not(self)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a probe found out about one device."""

    index: int
    name: str
    """As a person knows it, such as "NVIDIA H200"."""
    memory_bytes: int | None = None
    """Total memory; ``None`` where it cannot be known without a framework."""
    note: str = ""
    """What else a person should know in a few words, such as a slower way taken."""


Probe = Callable[[], Sequence[DeviceInfo]]
"""Lists the devices of one type without importing a framework.

Raises :class:`~inl.errors.BackendUnavailable` with the reason where there is none.
"""


def _is_index(text: str) -> bool:
    return INDEX.fullmatch(text) is not None and int(text) <= MAX_INDEX


def _complain(name: object, index: object) -> DeviceError:
    found = f"{name!r:.80}" if index is None else f"{name!r:.80} with index {index!r}"
    return DeviceError(
        f"device: found {found}, accepted: a lower-case type such as cpu, cuda or npu, "
        f"then perhaps ':' and an index of 0 to {MAX_INDEX}, such as cuda:1"
    )
