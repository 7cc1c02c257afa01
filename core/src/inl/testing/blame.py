"""Finds the op at fault in a composite, whose own cases may all be right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.spec.op import CATALOG, Case, OpSpec
from inl.spec.selection import select_kernel
from inl.spec.step import Step
from inl.spec.strict_array import StrictArray
from inl.spec.tolerance import judge
from inl.spec.tree import tree_map
from inl.testing.op_call import OpCall, values

if TYPE_CHECKING:
    from inl.spec.dispatch import ResolvedOps


def first_wrong_op(op_call: OpCall) -> tuple[str, str]:
    """Run a composite again and compare each op that its body calls with its own body.

    Returns the display name of the first kernel whose result is wrong on the inputs
    that it got, and what it found; two empty strings if there is none, or if a kernel
    computes the composite.
    """
    if not op_call.spec.composite or op_call.choice().kernel is not None:
        return "", ""
    ops, args = op_call.ready()
    watch = _Watch(op_call, ops)
    op_call.spec.body(watch, *args, **op_call.case.attrs)
    return watch.found


def first_raising_op(op_call: OpCall, error: Exception) -> str:
    """Run a composite again and fetch the result of each op that its body calls.

    For backends that compute when a result is fetched, where an error does not name the
    kernel. Returns the display name of the first kernel whose result raises such an
    error; empty if there is none, or if a kernel computes the composite.
    """
    if not op_call.spec.composite or op_call.choice().kernel is not None:
        return ""
    ops, args = op_call.ready()
    watch = _Watch(op_call, ops, error)
    try:
        op_call.spec.body(watch, *args, **op_call.case.attrs)
    # The error may also be one of a kernel that computes at once.
    except Exception:
        return watch.found[0]
    return watch.found[0]


class _Watch:
    """The ops of a body, each compared with its definition until one is wrong.

    error: looks for the op whose result raises it, in place of one that is wrong.
    """

    def __init__(
        self, op_call: OpCall, ops: ResolvedOps, error: Exception | None = None
    ) -> None:
        self._op_call, self._ops, self._error = op_call, ops, error
        self._raised: Exception | None = None
        """What fetching arrays has raised last."""
        self.found = "", ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CATALOG:
            raise AttributeError(name)
        return partial(self._call, CATALOG[name])

    def _call(self, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
        run = getattr(self._ops, spec.name)
        if spec.composite and isinstance(run, partial) and run.func is spec.body:
            return spec.body(self, *args, **attrs)
        given = None if self.found[0] else self._fetched(args)
        result = run(*args, **attrs)
        if given is not None:
            self._compare(spec, Case("", given, attrs), result)
        return result

    def _compare(self, spec: OpSpec, case: Case, result: Any) -> None:
        found = self._fetched(result)
        if self._error is not None:
            if self._raised is not None and _alike(self._raised, self._error):
                self.found = self._winner(spec, case), str(self._raised)
            return
        if found is None:
            return
        try:
            verdict = judge(spec, case, self._op_call.dtype, found)
        # The inputs may be in a layout that the op's body cannot read.
        except Exception:
            return
        if not verdict.passed:
            self.found = self._winner(spec, case), str(verdict)

    def _winner(self, spec: OpSpec, case: Case) -> str:
        specs = tree_map(_spec, case.args)
        selection = self._op_call.target.selection
        return select_kernel(spec, specs, case.attrs, selection).winner

    def _fetched(self, tree: Any) -> Any:
        """Copy arrays to the host, floating-point ones as float64.

        Returns ``None`` if some are in a layout of the backend.
        """
        numpy = self._op_call.target.backend.numpy

        def fetch(x: Any) -> Any:
            host = np.array(values(numpy(x)))
            return host.astype(np.float64) if host.dtype.kind == "f" else host

        self._raised = None
        try:
            return tree_map(fetch, _without_plans(tree))
        # Whatever a third-party backend raises for what is no array of its own.
        except Exception as error:
            self._raised = error
            return None


def _alike(error: Exception, other: Exception) -> bool:
    return type(error) is type(other) and str(error) == str(other)


def _without_plans(tree: Any) -> Any:
    if type(tree) is tuple:
        return tuple(map(_without_plans, tree))
    return tree._replace(plan={}) if isinstance(tree, Step) else tree


def _spec(x: Any) -> StrictArray:
    return StrictArray(np.shape(x), str(np.asarray(x).dtype.name))
