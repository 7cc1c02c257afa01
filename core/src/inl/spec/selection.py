"""Kernel selection: the kernel of each call site, and why others were refused."""

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
    """How an op is computed at the call sites that share a key."""

    op: str
    how: str
    """"native", "composed", "hosted" or "missing"."""
    kernel: Kernel | None
    refusals: tuple[tuple[str, str], ...]
    """(label, reason) of every candidate that was not chosen."""

    @property
    def winner(self) -> str:
        """Display name of the kernel or fallback that runs."""
        if self.kernel is None:
            return f"{self.op} ({self.how})"
        tuned = f" (tuned: {described(self.kernel.config)})"
        return self.kernel.label + (tuned if self.kernel.config else "")


@dataclass(frozen=True, slots=True)
class KernelSelection:
    """The kernels to choose from and the constraints on the choice."""

    kernels: tuple[Kernel, ...]
    host: Callable[[OpSpec], Callable[..., Any]] | None = None
    """Makes an op that runs its body in NumPy; set if ``allow_hosted`` is on."""
    invariant: bool = False
    """Whether to accept only kernels with ``Kernel.invariant``."""
    device_name: str = "this device"
    tuning_results: TuningResults = field(default_factory=TuningResults)
    """Results of ``inl tune`` on this device."""


def site_key(
    spec: OpSpec, args: tuple[Any, ...], attrs: dict[str, Any], tokens: int
) -> Key:
    """Return the key of a call site: weight layouts, inner sizes and attributes, and
    whether the first argument has a row for each of the ``tokens`` of the step.

    Opaque arguments (caches, steps) are left out.
    """
    first = getattr(args[0], "shape", ()) if args else ()
    # The last layer may compute the sampled tokens only, with other kernels.
    parts: list[Any] = [first[:1] == (tokens,), tuple(sorted(attrs.items(), key=_name))]
    for name, value in zip(spec.parameters, args, strict=True):
        if name == "w":
            layout = layout_of(value)
            parts.append(layout)
            if layout == PLAIN:
                parts += [tuple(leaf.shape) for leaf in leaves(value)]
        elif isinstance(value, tuple):
            parts.append(layout_of(value))
        elif name not in spec.consumes:
            parts.append(tuple(value.shape[1:]))
    return tuple(parts)


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def layout_of(w: Any) -> str:
    """Return the layout of a group: an attribute of traced leaves or of its tuple.

    A tuple without the attribute is in the layout ``PLAIN``.
    """
    first = next(leaves(w), w)  # a group may have no tensors
    owner = first if isinstance(first, StrictArray) else w
    return str(getattr(owner, "layout", PLAIN))


def select_kernel(
    spec: OpSpec, args: Any, attrs: dict[str, Any], selection: KernelSelection
) -> Choice:
    """Choose how to compute one call. Does not raise: the result may be "missing"."""
    layout = PLAIN
    if spec.weights is not None:
        layout = layout_of(args[spec.parameters.index("w")])
    accepted: list[Kernel] = []
    refusals: list[tuple[str, str]] = []
    tuning = selection.tuning_results
    work = workload(spec, args, attrs) if tuning else None
    fastest = tuning.winners.get(work) if work else None
    for kernel in (*selection.kernels, *([fastest] if fastest else [])):
        if kernel.op == spec.name:
            reason = tuning.quarantine_reason(kernel, work) if work else None
            reason = reason or _refusal(kernel, layout, args, attrs, selection)
            accepted += [] if reason else [kernel]
            refusals += [(kernel.label, reason)] if reason else []
    if accepted:
        winner = max(accepted, key=lambda kernel: kernel.preference)
        lost = f"has a lower preference than {winner.label}"
        if fastest in accepted:
            assert fastest is not None, "it was accepted"
            winner, lost = fastest, "is slower here, as inl tune measured"
        refusals += [(k.label, lost) for k in accepted if k is not winner]
        return Choice(spec.name, "native", winner, tuple(refusals))
    if spec.composite and (layout == PLAIN or spec.layout_opaque):
        dtype = str(args[0].dtype).rpartition(".")[2]
        if not spec.dtypes or dtype in spec.dtypes:
            return Choice(spec.name, "composed", None, tuple(refusals))
        needs = f"needs the range of {' or '.join(spec.dtypes)}, found {dtype}"
        refusals.append((f"{spec.name}/composed", needs))
        return Choice(spec.name, "missing", None, tuple(refusals))
    how = "hosted" if selection.host and layout == PLAIN else "missing"
    return Choice(spec.name, how, None, tuple(refusals))


def _refusal(
    kernel: Kernel,
    layout: str,
    args: Any,
    attrs: dict[str, Any],
    selection: KernelSelection,
) -> str | None:
    if kernel.layout != layout and CATALOG[kernel.op].weights is not None:
        return f"takes weights in layout {kernel.layout}, found {layout}"
    if selection.invariant and not kernel.invariant:
        return "is not batch-invariant, which the invariant option requires"
    return kernel.refuse(*args, **attrs)


def no_kernel_error(choice: Choice, where: str) -> NoKernel:
    """Return an error that lists every refusal."""
    lines = [f"no kernel for {choice.op} on {where}"]
    lines += [f"  {label}: {reason}" for label, reason in choice.refusals]
    if not choice.refusals:
        lines.append(
            "  no kernel is registered; try allow_hosted=True or --allow-hosted "
            "(computes in NumPy)"
        )
    error = NoKernel("\n".join(lines))
    error.op = choice.op
    return error
