"""Which kernel computes each op of a model at one bucket, and why.

The model is run once on :class:`~inl.spec.strict.StrictArray`: every call of an op is
a site, and every site gets a choice - *native* (a kernel accepted), else *composed*
(the op's body over other ops), else *hosted* (the body in NumPy, only if allowed),
else *missing*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from inl.errors import KernelFailed, NoKernel
from inl.spec.kernel import PLAIN, Kernel
from inl.spec.op import CATALOG, OpSpec
from inl.spec.strict import StrictArray
from inl.spec.tree import leaves, tree_map
from inl.spec.values import Bucket, Step
from inl.spec.workload import Findings, described, workload

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
class Policy:
    """What may be chosen."""

    kernels: tuple[Kernel, ...]
    host: Callable[[OpSpec], Callable[..., Any]] | None = None
    """Makes a hosted op, where ``allow_hosted`` was asked for."""
    invariant: bool = False
    where: str = "this device"
    findings: Findings = field(default_factory=Findings)
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


def pick(spec: OpSpec, args: Any, attrs: dict[str, Any], policy: Policy) -> Choice:
    """Choose for one site; never raises, a missing kernel is a choice too."""
    layout = PLAIN
    if spec.weights is not None:
        layout = layout_of(args[spec.parameters.index("w")])
    accepted: list[Kernel] = []
    refusals: list[tuple[str, str]] = []
    found = policy.findings
    work = workload(spec, args, attrs) if found else None
    fastest = found.winners.get(work) if work else None
    for kernel in (*policy.kernels, *([fastest] if fastest else [])):
        if kernel.op == spec.name:
            reason = found.bars(kernel, work) if work else None
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
    if spec.composite and (layout == PLAIN or spec.passes):
        return Choice(spec.name, "composed", None, tuple(refusals))
    how = "hosted" if policy.host and layout == PLAIN else "missing"
    return Choice(spec.name, how, None, tuple(refusals))


def _refusal(
    kernel: Kernel, layout: str, args: Any, attrs: dict[str, Any], policy: Policy
) -> str | None:
    if kernel.layout != layout and CATALOG[kernel.op].weights is not None:
        return f"takes weights laid out as {kernel.layout}, found {layout}"
    if policy.invariant and not kernel.invariant:
        return "is not invariant, and invariant mode was asked for"
    return kernel.refuse(*args, **attrs)


def complain(choice: Choice, where: str) -> NoKernel:
    """Error that lists every refusal."""
    lines = [f"no kernel for {choice.op} on {where}"]
    lines += [f"  {label}: {reason}" for label, reason in choice.refusals]
    if not choice.refusals:
        lines.append("  none is registered; allow_hosted=True computes it in NumPy")
    return NoKernel("\n".join(lines))


@dataclass(slots=True)
class Tracer:
    """Stands in for ``ops`` while a model runs on strict arrays."""

    policy: Policy
    bucket: Bucket
    block_size: int
    choices: dict[str, dict[Key, Choice]] = field(default_factory=dict)
    counts: dict[tuple[str, Key], int] = field(default_factory=dict)
    calls: dict[tuple[str, Key], tuple[tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=dict
    )
    """Arguments and attributes of the first call of each site."""
    quiet: int = 0

    def plan(self, _step: Step, **_: Any) -> tuple[()]:
        """Plans hold no shapes a model could see."""
        return ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name not in CATALOG:
            raise AttributeError(f"no op {name!r}; the catalog has {sorted(CATALOG)}")
        return partial(self._call, CATALOG[name])

    def _call(self, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
        key = site_key(spec, args, attrs)
        choice = self.choices.get(spec.name, {}).get(key)
        choice = choice or pick(spec, args, attrs, self.policy)
        if not self.quiet:
            self.choices.setdefault(spec.name, {})[key] = choice
            self.counts[spec.name, key] = self.counts.get((spec.name, key), 0) + 1
            self.calls.setdefault((spec.name, key), (args, attrs))
        if spec.shapes is not None:
            return tree_map(_strict, spec.shapes(*args, **attrs))
        quiet = choice.how != "composed"
        self.quiet += quiet
        try:
            return spec.body(self, *args, **attrs)
        finally:
            self.quiet -= quiet


def _strict(leaf: Any) -> StrictArray:
    return StrictArray(leaf.shape, leaf.dtype)


class Ops:
    """Plain callables, one set per bucket, already resolved: ``ops.linear(x, w)``."""

    bucket: Bucket
    block_size: int

    def __init__(self, tracer: Tracer) -> None:
        policy = tracer.policy
        for name, choices in tracer.choices.items():
            for choice in choices.values():
                if choice.how == "missing":
                    raise complain(choice, policy.where)
            self.__dict__[name] = self._callable(CATALOG[name], choices, policy)
        planners = {
            choice.kernel.label: choice.kernel.plan
            for choices in tracer.choices.values()
            for choice in choices.values()
            if choice.kernel and choice.kernel.plan
        }
        self.__dict__.update(
            bucket=tracer.bucket, block_size=tracer.block_size, _planners=planners
        )

    def at(self, bucket: Bucket) -> Ops:
        """Serve another exact size of the same class."""
        twin = object.__new__(Ops)
        twin.__dict__.update(self.__dict__)
        for name, value in self.__dict__.items():
            if isinstance(value, partial) and value.args and value.args[0] is self:
                twin.__dict__[name] = partial(value.func, twin, *value.args[1:])
        twin.__dict__["bucket"] = bucket
        return twin

    def plan(self, step: Step, *, block_size: int) -> dict[str, Any]:
        """Let each chosen kernel work out what its layers share."""
        planners: dict[str, Callable[..., Any]] = self.__dict__["_planners"]
        return {
            label: plan(step, block_size=block_size) for label, plan in planners.items()
        }

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"ops are frozen: cannot set {name!r}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"op {name!r} was not met when the model was traced")

    def _callable(
        self, spec: OpSpec, choices: dict[Key, Choice], policy: Policy
    ) -> Callable[..., Any]:
        runs = {key: self._run(spec, choice, policy) for key, choice in choices.items()}
        first = next(iter(choices.values()))
        same = all(
            choice.how == first.how and choice.kernel is first.kernel
            for choice in choices.values()
        )
        return next(iter(runs.values())) if same else _dispatch(spec, runs)

    def _run(self, spec: OpSpec, choice: Choice, policy: Policy) -> Callable[..., Any]:
        if choice.kernel is not None:
            return choice.kernel.run
        if choice.how == "composed":
            return partial(spec.body, self)
        if policy.host is None:
            raise complain(choice, policy.where)
        return policy.host(spec)


def _dispatch(spec: OpSpec, runs: dict[Key, Callable[..., Any]]) -> Callable[..., Any]:
    def run(*args: Any, **attrs: Any) -> Any:
        key = site_key(spec, args, attrs)
        if key not in runs:
            raise KernelFailed(
                f"{spec.name}: called with {key}, which was not met when the model was "
                f"traced; met: {list(runs)}"
            )
        return runs[key](*args, **attrs)

    return run


class LateOps:
    """Every op of the catalog, chosen when called: for trying ops one at a time."""

    def __init__(self, policy: Policy | Iterable[Kernel]) -> None:
        given = policy if isinstance(policy, Policy) else Policy(tuple(policy))
        self._policy = given

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CATALOG:
            raise AttributeError(f"no op {name!r}; the catalog has {sorted(CATALOG)}")
        return partial(self._call, CATALOG[name])

    def _call(self, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
        choice = pick(spec, args, attrs, self._policy)
        if choice.kernel is not None:
            return choice.kernel.run(*args, **attrs)
        if choice.how == "composed":
            return spec.body(self, *args, **attrs)
        if choice.how == "missing" or self._policy.host is None:
            raise complain(choice, self._policy.where)
        return self._policy.host(spec)(*args, **attrs)
