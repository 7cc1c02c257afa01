"""What the measured choice of a kernel holds for: an op, its dtype and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inl.spec.cache import Cache
from inl.spec.kernel import PLAIN, Kernel
from inl.spec.op import OpSpec
from inl.spec.step import Step
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves

Config = Mapping[str, int]
"""Tunables of a kernel by name; the empty one is the kernel as it comes."""


class Workload(NamedTuple):
    """Calls that are measured once for all."""

    op: str
    dtype: str
    shape: str
    """Rows up to a power of two, then the inner sizes of each argument."""


def workload(spec: OpSpec, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Workload:
    """Name the workload of a call of ``spec`` on tensors, or on what has their shapes.

    Numbers that change results and not work, such as ``eps``, take no part, nor do
    steps, whose rows are those of the other arguments.
    """
    parts: list[str] = []
    rows = 0
    for name, value in zip(spec.parameters, args, strict=True):
        if isinstance(value, Step):
            continue
        if isinstance(value, Cache):
            parts.append(f"{name}={_by(value.k.shape[1:])}")
        elif isinstance(value, (tuple, Mapping)):
            sizes = ",".join(_by(leaf.shape) for leaf in leaves(value))
            packed = "".join(f"{each}:" for each in _layouts(value))
            parts.append(f"{name}={packed}{sizes}")
        else:
            rows = rows or (value.shape[0] if value.shape else 0)
            parts += [f"{name}={_by(value.shape[1:])}"] if value.shape[1:] else []
    parts += [
        f"{name}={value}"
        for name, value in sorted(attrs.items())
        if isinstance(value, (str, int)) and name != "group"
    ]
    least = 1 << max(rows - 1, 0).bit_length()
    shape = " ".join([f"rows<={least}", *parts])
    return Workload(spec.name, _dtype(args), shape)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _layouts(value: Any) -> list[str]:
    """How a model's tensors are packed, where they are not plain."""
    strict = (leaf for leaf in leaves(value) if isinstance(leaf, StrictArray))
    return sorted({leaf.layout for leaf in strict} - {PLAIN})


def _dtype(args: tuple[Any, ...]) -> str:
    names = (str(leaf.dtype).removeprefix("torch.") for leaf in leaves(args))
    return next((name for name in names if "float" in name), "")


def described(config: Config) -> str:
    """A config as a person reads it."""
    return " ".join(f"{name}={value}" for name, value in config.items()) or "as it is"


def frozen(config: Config) -> tuple[tuple[str, int], ...]:
    """A config as a key."""
    return tuple(sorted(config.items()))


Barred = Mapping[tuple[Workload, str, tuple[tuple[str, int], ...]], str]
"""(workload, kernel's label, frozen config) -> why that kernel may not run it."""


@dataclass(frozen=True, slots=True)
class TuningResults:
    """What was measured on this device, for the choice of kernels."""

    winners: Mapping[Workload, Kernel] = field(default_factory=dict)
    """What was fastest, and right."""
    quarantined: Barred = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.winners or self.quarantined)

    def quarantine_reason(self, kernel: Kernel, work: Workload) -> str | None:
        """Why this kernel may not run a workload; ``None`` where it may."""
        return self.quarantined.get((work, kernel.label, frozen(kernel.config)))
