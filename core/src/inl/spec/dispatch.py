"""Op resolution: traces a model and binds each op to a kernel for one bucket.

The model runs once on :class:`~inl.spec.strict_array.StrictArray`. Each call of an op
is a call site, and each site gets a choice: *native* (a kernel supports it), else
*composed* (the op's body over other ops), else *hosted* (the body in NumPy, if
allowed), else *missing*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from inl.errors import NOTE, KernelFailed
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


class Call(NamedTuple):
    """One traced call of an op, outside of natively computed composites."""

    spec: OpSpec
    choice: Choice
    args: tuple[Any, ...]
    attrs: dict[str, Any]
    results: Any


Choices = dict[str, dict[Key, Choice]]
"""Choice for each site, by op."""


@dataclass(slots=True)
class Tracer:
    """An ``ops`` that records every call while a model runs on strict arrays."""

    selection: KernelSelection
    bucket: Bucket
    block_size: int
    choices: Choices = field(default_factory=dict)
    """Those that are given are not made again."""
    counts: dict[tuple[str, Key], int] = field(default_factory=dict)
    """Calls of each site."""
    calls: dict[tuple[str, Key], tuple[tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=dict
    )
    """Arguments and attributes of the first call of each site."""
    log: list[Call] = field(default_factory=list)
    """Every call, in order of completion."""
    _depth: int = 0
    """Enclosing bodies that only compute result shapes; they record nothing."""

    def plan(self, _step: Step, **_: Any) -> tuple[()]:
        """Return an empty plan: models do not read it."""
        return ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name not in CATALOG:
            raise AttributeError(f"no op {name!r}; the catalog has {sorted(CATALOG)}")
        return partial(self._call, CATALOG[name])

    def _call(self, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
        key = site_key(spec, args, attrs, self.bucket.tokens)
        choice = self.choices.get(spec.name, {}).get(key)
        choice = choice or select_kernel(spec, args, attrs, self.selection)
        recording = not self._depth
        if recording:
            self.choices.setdefault(spec.name, {})[key] = choice
            self.counts[spec.name, key] = self.counts.get((spec.name, key), 0) + 1
            self.calls.setdefault((spec.name, key), (args, attrs))
        results = self._results(spec, choice, args, attrs)
        if recording:
            self.log.append(Call(spec, choice, args, attrs, results))
        return results

    def _results(
        self, spec: OpSpec, choice: Choice, args: tuple[Any, ...], attrs: dict[str, Any]
    ) -> Any:
        if spec.shapes is not None:
            return tree_map(_strict, spec.shapes(*args, **attrs))
        hidden = choice.how != "composed"
        self._depth += hidden
        try:
            return spec.body(self, *args, **attrs)
        finally:
            self._depth -= hidden


def _strict(leaf: Any) -> StrictArray:
    return StrictArray(leaf.shape, leaf.dtype)


class ResolvedOps:
    """The ops of one bucket as callables that are bound to kernels.

    At run time it is an :class:`inl.ops.protocol.Ops` with the traced ops only. Raises
    :class:`~inl.errors.NoKernel` if a traced op has no kernel.
    """

    bucket: Bucket
    block_size: int

    def __init__(self, tracer: Tracer) -> None:
        selection = tracer.selection
        for name, choices in tracer.choices.items():
            for choice in choices.values():
                if choice.how == "missing":
                    raise no_kernel_error(choice, selection.device_name)
            self.__dict__[name] = self._callable(CATALOG[name], choices, selection)
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
        """Return the same ops for another exact size of the same class."""
        twin = object.__new__(ResolvedOps)
        twin.__dict__.update(self.__dict__)
        for name, value in self.__dict__.items():
            if isinstance(value, partial) and value.args and value.args[0] is self:
                twin.__dict__[name] = partial(value.func, twin, *value.args[1:])
        twin.__dict__["bucket"] = bucket
        return twin

    def plan(self, step: Step, *, block_size: int) -> dict[str, Any]:
        """Return the plan of each chosen kernel that has one, by its label."""
        planners: dict[str, Callable[..., Any]] = self.__dict__["_planners"]
        return {
            label: plan(step, block_size=block_size) for label, plan in planners.items()
        }

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"ops are frozen: cannot set {name!r}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"op {name!r} was not called when the model was traced")

    def _callable(
        self, spec: OpSpec, choices: dict[Key, Choice], selection: KernelSelection
    ) -> Callable[..., Any]:
        runs = {
            key: self._run(spec, choice, selection) for key, choice in choices.items()
        }
        first = next(iter(choices.values()))
        same = all(
            choice.how == first.how and choice.kernel is first.kernel
            for choice in choices.values()
        )
        if not same:
            return partial(_run_site, self, spec, runs)
        run = next(iter(runs.values()))
        return partial(run, self) if _is_body(spec, run) else run

    def _run(
        self, spec: OpSpec, choice: Choice, selection: KernelSelection
    ) -> Callable[..., Any]:
        if choice.kernel is not None:
            return noting(choice.kernel)
        if choice.how == "composed":
            return spec.body
        if selection.host is None:
            raise no_kernel_error(choice, selection.device_name)
        return selection.host(spec)


def noting(kernel: Kernel) -> Callable[..., Any]:
    """Return ``kernel.run``; an exception in it gets a note that names the kernel."""
    run, label = kernel.run, kernel.label

    def call(*args: Any, **attrs: Any) -> Any:
        try:
            return run(*args, **attrs)
        except Exception as error:
            error.add_note(f"{NOTE}{label}")
            raise

    return call


def _run_site(
    ops: ResolvedOps, spec: OpSpec, runs: dict[Key, Callable[..., Any]],
    *args: Any, **attrs: Any,
) -> Any:  # fmt: skip
    """Run the kernel of a call site, or the body of a composite on ``ops``."""
    whole, *sizes = key = site_key(spec, args, attrs, ops.bucket.tokens)
    # Exact sizes of a class may have other numbers of rows than its representative.
    run = runs.get(key) or runs.get((not whole, *sizes))
    if run is None:
        raise KernelFailed(
            f"{spec.name}: found a call with {key}, but tracing the model recorded "
            f"only {list(runs)}"
        )
    return run(ops, *args, **attrs) if _is_body(spec, run) else run(*args, **attrs)


def _is_body(spec: OpSpec, run: Callable[..., Any]) -> bool:
    """Whether a composite is computed by its body, which takes the ops."""
    return spec.composite and run is spec.body


class DynamicOps:
    """Every op of the catalog, with the kernel chosen at each call.

    Slower than :class:`ResolvedOps`; for calling single ops without a model.
    """

    def __init__(self, kernels: KernelSelection | Iterable[Kernel]) -> None:
        self._selection = (
            kernels
            if isinstance(kernels, KernelSelection)
            else KernelSelection(tuple(kernels))
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CATALOG:
            raise AttributeError(f"no op {name!r}; the catalog has {sorted(CATALOG)}")
        return partial(self._call, CATALOG[name])

    def _call(self, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
        choice = select_kernel(spec, args, attrs, self._selection)
        if choice.kernel is not None:
            return choice.kernel.run(*args, **attrs)
        if choice.how == "composed":
            return spec.body(self, *args, **attrs)
        if choice.how == "missing" or self._selection.host is None:
            raise no_kernel_error(choice, self._selection.device_name)
        return self._selection.host(spec)(*args, **attrs)
