"""``inl check`` names the kernel whose error comes when its result is fetched."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl.spec.tree import leaves, tree_map
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.target import Target


class Late:
    """A device array whose kernel failed: reading it raises the error."""

    def __init__(self, value, failed):
        self.value, self.failed = value, failed
        self.shape, self.dtype = value.shape, value.dtype

    def __getitem__(self, at):
        return Late(self.value[at], self.failed)

    def __add__(self, other):
        return Late(self.value + other.value, self.failed or other.failed)


def tensor(host):
    values = widen(host)
    kind = np.float32 if values.dtype.kind == "f" else values.dtype
    return Late(np.array(values, kind), False)


def numpy(x):
    if x.failed:
        raise ValueError("the device reports error 7")
    return wrap(np.asarray(x.value))


def late(run, fails):
    """A kernel of such a device."""

    def kernel(*args, **attrs):
        failed = fails or any(x.failed for x in leaves(args) if isinstance(x, Late))
        values = tree_map(lambda x: x.value if isinstance(x, Late) else x, args)
        return tree_map(lambda x: Late(np.asarray(x), failed), run(*values, **attrs))

    return kernel


def target(faulty):
    def kernels():
        for op in catalog().values():
            if not op.composite:
                run = late(body_kernel(op, "float32"), op.name == faulty)
                yield Kernel(op.name, "lazy", run)

    make = simple_backend(
        tensor=tensor, numpy=numpy, kernels=kernels, traits=Traits(dtypes=("float32",))
    )
    found = Target(Device("lazy:0"))
    vars(found)["backend"] = make(found.device)
    return found


@pytest.mark.parametrize(
    ("faulty", "composite"),
    [("gated_activation", "gated_mlp"), ("rms_norm", "norm_logits")],
)
def test_a_composite_names_the_kernel_that_raises(faulty, composite):
    checks = checks_of(target(faulty), ["kernel"])
    for name in (faulty, composite):
        (first, *_) = [check for check in checks if check.name.startswith(f"{name}/")]
        result = perform(first, {})
        assert result.status == "failed"
        assert "ValueError: the device reports error 7" in result.message
        assert f"{faulty}/lazy" in result.message
    assert result.fault.cause == f"{faulty}/lazy"
