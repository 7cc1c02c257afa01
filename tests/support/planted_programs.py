"""Backends whose programs keep or copy the cache that they consume, and their check."""

from __future__ import annotations

import numpy as np

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.target import Target


def report(make, device="planted:0"):
    """Return the result of the check of consumption for a backend."""
    target = Target(Device(device))
    # The registry has no such device: the target uses this backend.
    target.__dict__["backend"] = make(target.device)
    (check,) = (
        check
        for check in checks_of(target, ["runner"])
        if check.name.startswith("runner/consumed")
    )
    return perform(check, {})


def keeping(program):
    """Wrap a program so that it keeps its arguments."""
    arguments = []

    def run(*args):
        arguments[:] = [args]
        return program(*args)

    return run


def written_in_place(k, v, cache, writes):
    cells = np.divmod(writes, cache.k.shape[1])
    cache.k[cells], cache.v[cells] = k, v
    return cache


def written_to_a_copy(k, v, cache, writes):
    return written_in_place(k, v, Cache(cache.k.copy(), cache.v.copy()), writes)


def eager_backend(write_kv, compile=None):  # noqa: A002
    """Return a NumPy backend that writes keys and values by ``write_kv``."""

    def tensor(host):
        values = widen(host)
        float_like = values.dtype.kind == "f"
        return np.array(values, np.float32 if float_like else values.dtype)

    def kernels():
        yield Kernel("write_kv", "planted", write_kv, preference=1)
        for op in catalog().values():
            if not op.composite:
                yield Kernel(op.name, "body", body_kernel(op, "float32"))

    return simple_backend(
        tensor=tensor, numpy=wrap, kernels=kernels, compile=compile,
        traits=Traits(dtypes=("float32",), block_size=8),
    )  # fmt: skip
