"""The twelve wrong kernels, traced by ``jax.jit``: each is found and named."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from depth import only_long
from inl.backend.base import Traits
from inl.dtypes import HostArray, widen, wrap
from inl.plugin import simple_backend
from planted_faults import (
    PLANTED,
    matches,
    planted_kernels,
    quotations,
    report,
)


@pytest.fixture
def traced_backend(jax_module):
    """Function of a fault and a dtype: a backend whose kernels are jitted."""
    jax, jnp = jax_module.jax, jax_module.jnp

    class Jax:
        label = "numpy"  # the name in the quoted reports
        arange, where, zeros = jnp.arange, jnp.where, jnp.zeros

        @staticmethod
        def astype(x, dtype):
            with jax.enable_x64(True):
                return x.astype(dtype)

        @staticmethod
        def compiled(run):
            def call(*args, **attrs):
                with jax.enable_x64(True):
                    return jax.jit(partial(run, **attrs))(*args)

            return call

        @staticmethod
        def round_half(x):
            return x.astype(jnp.bfloat16)

    def tensor(host):
        dtype = jnp.bfloat16 if host.dtype == "bfloat16" else None
        return jnp.array(widen(host), dtype, copy=True)

    def numpy(x):
        if x.dtype == jnp.bfloat16:
            return HostArray(np.asarray(x).view(np.uint16), "bfloat16", x.shape)
        return wrap(np.asarray(x))

    def make(fault, dtype="float32"):
        runs = jax_module.KERNELS
        return simple_backend(
            tensor=tensor,
            numpy=numpy,
            kernels=partial(planted_kernels, fault, Jax, runs.__getitem__, runs),
            compile=jax_module.jit,
            buckets=jax_module.buckets,
            traits=Traits((dtype,), block_size=8),
        )

    return make


QUICK = ("float64", "64 rows", "NaN")
QUOTED = dict(zip(PLANTED, quotations(), strict=True))


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else only_long(fault) for fault in QUOTED]
)
def test_a_fault_is_reported_as_the_page_quotes(traced_backend, fault):
    heading, quoted = QUOTED[fault]
    lines = report(traced_backend, fault)
    assert matches(quoted, lines), f"{heading}\n" + "\n".join(lines)
