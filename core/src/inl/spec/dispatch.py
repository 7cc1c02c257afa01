"""The ops of a model at one bucket, each resolved to one kernel.

The model runs once on :class:`~inl.spec.strict_array.StrictArray`: every call of an op
is a call site, and every site gets a choice: *native* (a kernel accepts it), else
*composed* (the op's body over other ops), else *hosted* (the body in NumPy, only if
allowed), else *missing*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from inl.errors import KernelFailed
from inl.spec.kernel import Kernel
from inl.spec.op import CATALOG, OpSpec
from inl.spec.selection import (
    Choice,
    KernelSelection,
    Key,
    no_kernel_error,
    select_kernel,
    site_key,
)
from inl.spec.step import Bucket, Step
from inl.spec.strict_array import StrictArray
from inl.spec.tree import tree_map


@dataclass(slots=True)
class Tracer:
    """Stands in for ``ops`` while a model runs on strict arrays."""

    selection: KernelSelection
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
        choice = choice or select_kernel(spec, args, attrs, self.selection)
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


class ResolvedOps:
    """Plain callables, one set per bucket, already resolved: ``ops.linear(x, w)``."""

    bucket: Bucket
    block_size: int

    def __init__(self, tracer: Tracer) -> None:
        policy = tracer.selection
        for name, choices in tracer.choices.items():
            for choice in choices.values():
                if choice.how == "missing":
                    raise no_kernel_error(choice, policy.device_name)
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

    def at(self, bucket: Bucket) -> ResolvedOps:
        """Serve another exact size of the same class."""
        twin = object.__new__(ResolvedOps)
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
        self, spec: OpSpec, choices: dict[Key, Choice], policy: KernelSelection
    ) -> Callable[..., Any]:
        runs = {key: self._run(spec, choice, policy) for key, choice in choices.items()}
        first = next(iter(choices.values()))
        same = all(
            choice.how == first.how and choice.kernel is first.kernel
            for choice in choices.values()
        )
        return next(iter(runs.values())) if same else _dispatch(spec, runs)

    def _run(
        self, spec: OpSpec, choice: Choice, policy: KernelSelection
    ) -> Callable[..., Any]:
        if choice.kernel is not None:
            return choice.kernel.run
        if choice.how == "composed":
            return partial(spec.body, self)
        if policy.host is None:
            raise no_kernel_error(choice, policy.device_name)
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


class DynamicOps:
    """Every op of the catalog, chosen when called: for trying ops one at a time."""

    def __init__(self, policy: KernelSelection | Iterable[Kernel]) -> None:
        given = (
            policy
            if isinstance(policy, KernelSelection)
            else KernelSelection(tuple(policy))
        )
        self._policy = given

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CATALOG:
            raise AttributeError(f"no op {name!r}; the catalog has {sorted(CATALOG)}")
        return partial(self._call, CATALOG[name])

    def _call(self, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
        choice = select_kernel(spec, args, attrs, self._policy)
        if choice.kernel is not None:
            return choice.kernel.run(*args, **attrs)
        if choice.how == "composed":
            return spec.body(self, *args, **attrs)
        if choice.how == "missing" or self._policy.host is None:
            raise no_kernel_error(choice, self._policy.device_name)
        return self._policy.host(spec)(*args, **attrs)
