"""A NumPy backend with one wrong kernel, as a target of the conformance kit."""

from __future__ import annotations

import numpy as np

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.findings import findings
from inl.testing.target import Target


def tensor(host):
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def target_of(
    kernels=None,
    *,
    only=(),
    traits=None,
    model=None,
    tensor=tensor,
    numpy=wrap,
    **fields,
):
    def right():
        for op in catalog().values():
            if not op.composite:
                yield Kernel(op.name, "planted", body_kernel(op, "float32"))

    make = simple_backend(
        tensor=tensor,
        numpy=numpy,
        kernels=kernels or right,
        traits=traits or Traits(dtypes=("float32",), block_size=8, depth=2),
        **fields,
    )
    target = Target(Device("planted:0"), only=only, model=model)
    # The registry has no such device: the target uses this backend.
    target.__dict__["backend"] = make(target.device)
    return target


def with_fault(name, wrong):
    def kernels():
        found = False
        for op in catalog().values():
            run = body_kernel(op, "float32") if not op.composite else None
            if op.name == name:
                found, run = True, wrong(run)
            if run is not None:
                yield Kernel(op.name, "planted", run)
        assert found

    return kernels


def failures(target, section, beginning=""):
    """What the checks of a section find whose names have this beginning."""
    checks = checks_of(target, [section])
    results = [
        perform(check, {}) for check in checks if check.name.startswith(beginning)
    ]
    assert results
    return findings(results)


def traced_target(jax_module, kernels, only, compile=None, **fields):  # noqa: A002
    """A target whose kernels of the traced scaffold are ``kernels``."""
    make = simple_backend(
        tensor=jax_module.tensor,
        numpy=jax_module.numpy,
        kernels=kernels,
        compile=compile or jax_module.jit,
        buckets=jax_module.buckets,
        traits=Traits(dtypes=("float32",), block_size=8, depth=2),
        **fields,
    )
    target = Target(Device("planted:0"), only=only)
    target.__dict__["backend"] = make(target.device)
    return target
