"""Fallback kernels: the NumPy bodies of ops without a native kernel."""

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
    from inl_cpu.command_emitter import CommandEmitter


INTEGER_OPS = (
    "accepted_rows", "expand_rows", "own_slots", "take_rows", "verify", "read_slots",
    "write_slots",
)  # fmt: skip
"""Ops that only copy and compare, hence batch-invariant."""


def body_kernel(emitter: CommandEmitter, spec: OpSpec) -> Kernel:
    """The body of a primitive op as a kernel of the lowest preference."""
    run = partial(run_body, emitter, spec)
    invariant = spec.name in INTEGER_OPS
    return Kernel(
        spec.name, "numpy", run, invariant=invariant, preference=-1,
        run_part=run if spec.name == "expert_linear" else None,
    )  # fmt: skip


def run_body(emitter: CommandEmitter, spec: OpSpec, *args: Any, **attrs: Any) -> Any:
    """Compute or record an op's body; consumed arguments are updated in place."""
    assert spec.shapes is not None, "a composite runs over its ops"
    results = tree_map(partial(_allocate, emitter), spec.shapes(*args, **attrs))
    given = tree_map(plain, args)
    targets = [plain(leaf) for leaf in leaves(results)]

    def run() -> None:
        values = round_results(spec, spec.body(*given, **attrs), "float32")
        for target, value in zip(targets, leaves(values), strict=True):
            np.copyto(target, value, casting="same_kind")

    inputs = [leaf for leaf in leaves(args) if isinstance(leaf, np.ndarray)]
    emitter.python(run, inputs)
    return results


def _allocate(emitter: CommandEmitter, leaf: Any) -> Any:
    """Memory for one result: new, or that of the argument that it replaces."""
    return emitter.new(leaf.shape, str(leaf.dtype)) if isinstance(leaf, Spec) else leaf
