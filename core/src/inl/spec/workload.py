"""Workloads of kernel tuning: the op, dtype and sizes that a measurement covers."""

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
"""Tunable parameters of a kernel by name; the empty config is the default kernel."""


class Workload(NamedTuple):
    """Calls of an op that share one measurement."""

    op: str
    dtype: str
    shape: str
    """Rows rounded up to a power of two, then the inner sizes of each argument."""


def workload(spec: OpSpec, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Workload:
    """Return the workload of a call of ``spec``.

    args: tensors or specs. Attributes that change values but not the amount of work,
    such as ``eps``, are left out. So are steps: their rows are those of the other
    arguments.
    """
    parts: list[str] = []
    rows = 0
    for name, value in zip(spec.parameters, args, strict=True):
        if isinstance(value, Step):
            continue
        if isinstance(value, Cache):
            parts.append(f"{name}={_join_sizes(value.k.shape[1:])}")
        elif isinstance(value, (tuple, Mapping)):
            sizes = ",".join(_join_sizes(leaf.shape) for leaf in leaves(value))
            layouts = "".join(f"{layout}:" for layout in _packed_layouts(value))
            parts.append(f"{name}={layouts}{sizes}")
        else:
            inner = value.shape[1:]
            rows = rows or (value.shape[0] if value.shape else 0)
            parts += [f"{name}={_join_sizes(inner)}"] if inner else []
    parts += [
        f"{name}={value}"
        for name, value in sorted(attrs.items())
        if isinstance(value, (str, int)) and name != "group"
    ]
    row_class = 1 << max(rows - 1, 0).bit_length()
    shape = " ".join([f"rows<={row_class}", *parts])
    return Workload(spec.name, _dtype(args), shape)


def _join_sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _packed_layouts(value: Any) -> list[str]:
    """Layouts of the traced tensors in a tree, without the plain one."""
    strict = (leaf for leaf in leaves(value) if isinstance(leaf, StrictArray))
    return sorted({leaf.layout for leaf in strict} - {PLAIN})


def _dtype(args: tuple[Any, ...]) -> str:
    names = (str(leaf.dtype).removeprefix("torch.") for leaf in leaves(args))
    return next((name for name in names if "float" in name), "")


def described(config: Config) -> str:
    """Format a config for display."""
    return " ".join(f"{name}={value}" for name, value in config.items()) or "default"


def frozen(config: Config) -> tuple[tuple[str, int], ...]:
    """Return a config as a hashable key."""
    return tuple(sorted(config.items()))


Quarantine = Mapping[tuple[Workload, str, tuple[tuple[str, int], ...]], str]
"""(workload, kernel label, frozen config) -> why the kernel must not run it."""


@dataclass(frozen=True, slots=True)
class TuningResults:
    """Measurements on this device that influence kernel selection."""

    winners: Mapping[Workload, Kernel] = field(default_factory=dict)
    """Fastest kernel whose results are correct."""
    quarantined: Quarantine = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.winners or self.quarantined)

    def quarantine_reason(self, kernel: Kernel, work: Workload) -> str | None:
        """Return why a kernel must not run a workload, or ``None`` if it may."""
        return self.quarantined.get((work, kernel.label, frozen(kernel.config)))
