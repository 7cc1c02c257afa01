"""Ops without a native kernel: their bodies, in float32 NumPy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.spec.kernel import Kernel
from inl.spec.op import OpSpec, Spec
from inl.spec.tolerance import round_results
from inl.spec.tree import leaves, tree_map
from inl_cpu.tensor import plain

if TYPE_CHECKING:
    from inl_cpu.command_emitter import Stage


def body_kernel(stage: Stage, spec: OpSpec) -> Kernel:
    """The body of a primitive op as a kernel that any other is preferred to."""
    run = partial(run_body, stage, spec)
    return Kernel(spec.name, "numpy", run, preference=-1)


def run_body(stage: Stage, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
    """Compute a body, or record it. What the op consumes is written in place."""
    assert spec.shapes is not None, "a composite runs over its ops"
    results = tree_map(partial(_place, stage), spec.shapes(*args, **attrs))
    given = tree_map(plain, args)
    targets = [plain(leaf) for leaf in leaves(results)]

    def run() -> None:
        found = round_results(spec, spec.body(*given, **attrs), "float32")
        for target, value in zip(targets, leaves(found), strict=True):
            np.copyto(target, value, casting="same_kind")

    inputs = [leaf for leaf in leaves(args) if isinstance(leaf, np.ndarray)]
    stage.python(run, inputs)
    return results


def _place(stage: Stage, leaf: Any) -> Any:
    """Memory for one result: its own, or that of the argument that it replaces."""
    return stage.new(leaf.shape, str(leaf.dtype)) if isinstance(leaf, Spec) else leaf
