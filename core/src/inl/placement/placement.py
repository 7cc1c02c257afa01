"""Placement: the axes over which a model is divided among devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inl.backend.collectives import AXES
from inl.errors import RequestError

DEVICES, HOSTS = "devices", "hosts"
SEPARATOR = "+"
"""Between the names of devices in a placement's text."""
MAX_SIZE = 9999


@dataclass(frozen=True, slots=True)
class Placement:
    """Number of devices along each axis, and which devices.

    Written as its axes of more than one device, such as "pipeline=2,tensor=4". Devices
    are numbered with the last axis changing fastest. Raises
    :class:`~inl.errors.RequestError` for other sizes than 1 to 9999, for another
    number of devices, and for hosts that do not divide the devices.
    """

    data: int = 1
    """Devices that share the rows of a step or the blocks of the caches."""
    pipeline: int = 1
    """Devices that share the layers, in order."""
    tensor: int = 1
    """Devices that share the heads and the inner lanes of each layer."""
    expert: int = 1
    """Devices that share the experts of each layer."""
    devices: tuple[str, ...] = ()
    """Names of the devices in order; empty for the engine's device and those after
    it."""
    hosts: int = 1
    """Hosts that the devices belong to, an equal number to each, where one program
    drives all devices: each host has one worker, which drives its own."""

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if type(size) is not int or not 0 < size <= MAX_SIZE:
                raise RequestError(
                    f"placement: found {axis}={size!r:.80}, accepted: 1 to {MAX_SIZE}"
                )
        if self.devices and len(self.devices) != self.count:
            raise RequestError(
                f"placement {self}: found {len(self.devices)} devices, accepted: "
                f"{self.count}"
            )
        if type(self.hosts) is not int or self.hosts < 1 or self.count % self.hosts:
            raise RequestError(
                f"placement: found {HOSTS}={self.hosts!r:.80} for {self.count} "
                "devices, accepted: a number that divides them"
            )
        if self.devices and self.hosts > 1:
            raise RequestError(
                f"placement {self}: found names of devices, accepted: none with "
                f"{HOSTS}, each of which has the first ones"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of devices along each of :data:`~inl.backend.collectives.AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each axis of more than one device, in order."""
        pairs = zip(AXES, self.sizes, strict=True)
        return tuple((axis, size) for axis, size in pairs if size > 1)

    def __str__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self.axes] or ["tensor=1"]
        if self.devices:
            parts.append(f"{DEVICES}={SEPARATOR.join(self.devices)}")
        if self.hosts > 1:
            parts.append(f"{HOSTS}={self.hosts}")
        return ",".join(parts)


def parse_placement(text: object, name: str = "placement") -> Placement:
    """Read a placement such as "tensor=4,data=2"; other axes have size 1.

    "devices=cuda:0+cuda:2" names its devices, "hosts=2" says how many hosts have them.
    name: of the option. Raises
    :class:`~inl.errors.RequestError`.
    """
    if isinstance(text, Placement):
        return text
    sizes: dict[str, int] = {}
    devices: tuple[str, ...] = ()
    for part in text.split(",") if isinstance(text, str) else ("",):
        key, _, value = (word.strip() for word in part.partition("="))
        names = tuple(each.strip() for each in value.split(SEPARATOR))
        if key == DEVICES and not devices and all(names):
            devices = names
        elif key in (*AXES, HOSTS) and key not in sizes and is_size(value):
            sizes[key] = int(value)
        else:
            raise RequestError(
                f"{name}: found {text!r:.80}, accepted: AXIS=SIZE separated by "
                f"commas, such as tensor=4,data=2; each of {', '.join(AXES)} and "
                f"{HOSTS} at most once, and sizes of 1 to {MAX_SIZE}"
            )
    return Placement(**sizes, devices=devices)


def is_size(text: str) -> bool:
    """Whether the text is a whole number of 1 to 9999."""
    return text.isascii() and text.isdigit() and 0 < int(text[:5]) <= MAX_SIZE
