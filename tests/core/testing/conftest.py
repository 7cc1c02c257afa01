from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTY = '''
"""A NumPy device with one fault, selected by the variable INL_FAULT."""

import os

import numpy as np

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.dtypes import EPSILON, widen, wrap
from inl.ops import catalog
from inl.plugin import hookimpl, simple_backend
from inl.spec.kernel import Kernel

FAULT = os.environ.get("INL_FAULT", "none")


def wrong_scale(run):
    return lambda q, *rest, scale, **attrs: run(q, *rest, scale=scale * 1.01, **attrs)


def shifted_rope(run):
    return lambda positions, **attrs: run(positions + 1, **attrs)


def shifted_write(run):
    return lambda k, v, cache, writes: run(k, v, cache, writes + 1)


def fixed_uniform(run):
    def sample(logits, step, tables, **attrs):
        half = np.full(step.uniforms.shape, 0.5, np.float32).view(np.int32)
        return run(logits, step._replace(uniforms=half), tables, **attrs)

    return sample


def biased(run):
    def linear(x, w):
        y = run(x, w)
        share = np.float32(40 * EPSILON["float32"])
        return y + share * np.abs(y).max(-1, keepdims=True)

    return linear


def first_only(run):
    return lambda messages, tables: run(messages[:1], tables)


WRAPPED = {
    "alone": ("admit", first_only),
    "scale": ("attention", wrong_scale),
    "rope": ("rope_table", shifted_rope),
    "write": ("write_kv", shifted_write),
    "uniform": ("sample", fixed_uniform),
    "bias": ("linear", biased),
}


def kernels():
    name, wrap_run = WRAPPED.get(FAULT, ("", None))
    for op in catalog().values():
        if not op.composite:
            run = body_kernel(op, "float32")
            yield Kernel(op.name, "numpy", wrap_run(run) if op.name == name else run)


def tensor(host):
    values = widen(host)
    return np.array(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def backend(device):
    if FAULT == "leak":
        from inl.kv.block_pool import BlockPool

        free = BlockPool.free
        BlockPool.free = lambda pool, blocks: free(
            pool, blocks[:-1] if len(blocks) == 2 else blocks
        )
    traits = Traits(dtypes=("float32",), block_size=8)
    make = simple_backend(tensor=tensor, numpy=wrap, kernels=kernels, traits=traits)
    return make(device)


@hookimpl
def inl_register_backends(register):
    register("faulty", backend)
'''


@pytest.fixture
def check(tmp_path):
    """Run ``inl check`` on the faulty device with one fault, in a new process."""
    (tmp_path / "faulty_plugin.py").write_text(FAULTY)

    def run(*words, fault="none"):
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        plant = {"INL_PLUGINS": "faulty_plugin", "INL_FAULT": fault}
        return subprocess.run(
            [sys.executable, "-m", "inl", "check", *words],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | plant | {"PYTHONPATH": path},
        )

    return run
