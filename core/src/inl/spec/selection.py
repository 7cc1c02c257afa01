"""Which kernel computes an op at one call site, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inl.errors import NoKernel
from inl.spec.kernel import PLAIN, Kernel
from inl.spec.op import CATALOG, OpSpec
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves
from inl.spec.workload import TuningResults, described, workload

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one op is computed at the sites that share a key."""

    op: str
    how: str
    """"native", "composed", "hosted" or "missing"."""
    kernel: Kernel | None
    refusals: tuple[tuple[str, str], ...]
    """(label, sentence) of every candidate that did not win."""

    @property
    def winner(self) -> str:
        """What runs, as a person reads it."""
        if self.kernel is None:
            return f"{self.op} ({self.how})"
        tuned = f" (tuned: {described(self.kernel.config)})"
        return self.kernel.label + (tuned if self.kernel.config else "")


@dataclass(frozen=True, slots=True)
class KernelSelection:
    """What may be chosen."""

    kernels: tuple[Kernel, ...]
    host: Callable[[OpSpec], Callable[..., Any]] | None = None
    """Makes a hosted op, where ``allow_hosted`` was asked for."""
    invariant: bool = False
    device_name: str = "this device"
    tuning_results: TuningResults = field(default_factory=TuningResults)
    """What ``inl tune`` measured here."""


def site_key(spec: OpSpec, args: tuple[Any, ...], attrs: dict[str, Any]) -> Key:
    """What tells the sites of an op apart: weights, inner sizes and attributes.

    Opaque arguments (caches, steps) do not take part.
    """
    parts: list[Any] = [tuple(sorted(attrs.items(), key=_name))]
    for name, value in zip(spec.parameters, args, strict=True):
        if name == "w":
            layout = layout_of(value)
            parts.append(layout)
            if layout == PLAIN:
                parts += [tuple(leaf.shape) for leaf in leaves(value)]
        elif name not in spec.consumes and not isinstance(value, tuple):
            parts.append(tuple(value.shape[1:]))
    return tuple(parts)


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def layout_of(w: Any) -> str:
    """Layout of a group's tensors: a traced one carries it, a real one is typed so."""
    first = next(leaves(w))
    return str(first.layout if isinstance(first, StrictArray) else w.layout)


def select_kernel(
    spec: OpSpec, args: Any, attrs: dict[str, Any], policy: KernelSelection
) -> Choice:
    """Choose for one site; never raises, a missing kernel is a choice too."""
    layout = PLAIN
    if spec.weights is not None:
        layout = layout_of(args[spec.parameters.index("w")])
    accepted: list[Kernel] = []
    refusals: list[tuple[str, str]] = []
    found = policy.tuning_results
    work = workload(spec, args, attrs) if found else None
    fastest = found.winners.get(work) if work else None
    for kernel in (*policy.kernels, *([fastest] if fastest else [])):
        if kernel.op == spec.name:
            reason = found.quarantine_reason(kernel, work) if work else None
            reason = reason or _refusal(kernel, layout, args, attrs, policy)
            accepted += [] if reason else [kernel]
            refusals += [(kernel.label, reason)] if reason else []
    if accepted:
        winner = max(accepted, key=lambda kernel: kernel.preference)
        lost = f"preference below that of {winner.label}"
        if fastest in accepted:
            assert fastest is not None, "it was accepted"
            winner, lost = fastest, "inl tune found another faster here"
        refusals += [(k.label, lost) for k in accepted if k is not winner]
        return Choice(spec.name, "native", winner, tuple(refusals))
    if spec.composite and (layout == PLAIN or spec.layout_opaque):
        return Choice(spec.name, "composed", None, tuple(refusals))
    how = "hosted" if policy.host and layout == PLAIN else "missing"
    return Choice(spec.name, how, None, tuple(refusals))


def _refusal(
    kernel: Kernel,
    layout: str,
    args: Any,
    attrs: dict[str, Any],
    policy: KernelSelection,
) -> str | None:
    if kernel.layout != layout and CATALOG[kernel.op].weights is not None:
        return f"takes weights laid out as {kernel.layout}, found {layout}"
    if policy.invariant and not kernel.invariant:
        return "is not invariant, and invariant mode was asked for"
    return kernel.refuse(*args, **attrs)


def no_kernel_error(choice: Choice, where: str) -> NoKernel:
    """Error that lists every refusal."""
    lines = [f"no kernel for {choice.op} on {where}"]
    lines += [f"  {label}: {reason}" for label, reason in choice.refusals]
    if not choice.refusals:
        lines.append("  none is registered; allow_hosted=True computes it in NumPy")
    return NoKernel("\n".join(lines))
