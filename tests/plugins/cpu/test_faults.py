"""``inl check`` detects each of six faults injected into the CPU backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

FAULTY = '''
"""The CPU backend with one fault, named by the variable INL_FAULT."""

import os
from dataclasses import replace

from inl.device import Device
from inl.plugin import hookimpl

FAULT = os.environ.get("INL_FAULT", "none")


def wrong_scale(run):
    return lambda *args, scale, **kept: run(*args, scale=scale * 1.02, **kept)


def late_rope(run):
    return lambda positions, **kept: run(positions + 1, **kept)


def late_write(run):
    def attend(q, k, v, cache, step, **kept):
        late = (step.writes + 1) % (cache.blocks * cache.block_size)
        return run(q, k, v, cache, step._replace(writes=late), **kept)

    return attend


def own_uniform(run):
    def choose(logits, step, tables, **kept):
        return run(logits, step._replace(uniforms=step.uniforms * 0), tables, **kept)

    return choose


def biased(run):
    return lambda x, w: run(x, w) * 1.05


FAULTS = {
    "scale": (("attention", "attend"), wrong_scale),
    "rope": (("rope_table",), late_rope),
    "write": (("attend",), late_write),
    "uniform": (("sample",), own_uniform),
    "bias": (("linear",), biased),
}


def faulty(device):
    from inl_cpu.backend import open_cpu

    backend = open_cpu(Device("cpu"))
    backend.device, sound = device, backend.kernels
    names, wrap = FAULTS.get(FAULT, ((), None))

    def kernels():
        for kernel in sound():
            wrong = kernel.op in names
            yield replace(kernel, run=wrap(kernel.run)) if wrong else kernel

    backend.kernels = kernels
    if FAULT == "leak":
        leak()
    return backend


def leak():
    from inl.kv.block_pool import BlockPool

    free = BlockPool.free
    BlockPool.free = lambda pool, blocks: free(
        pool, blocks[:-1] if len(blocks) == 2 else blocks
    )


@hookimpl
def inl_register_backends(register):
    register("faulty", faulty)
'''


@pytest.fixture
def card(tmp_path, backend):
    """Runs ``inl check`` on the native backend with a fault; returns its report."""
    (tmp_path / "faulty_plugin.py").write_text(FAULTY)

    def run(fault, *checks):
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        plant = {"INL_PLUGINS": "faulty_plugin", "INL_FAULT": fault}
        done = subprocess.run(
            [sys.executable, "-m", "inl", "check", "faulty:0", "--json"]
            + [word for each in checks for word in ("--only", each)],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | plant | {"PYTHONPATH": path},
        )
        found = json.loads(done.stdout)
        assert done.returncode == (not found["passed"]), done.stderr
        return found

    return run


FAULTS = {
    "scale": ("attention/", "attend/"),
    "rope": ("rope_table/",),  # distances stay what they were
    "bias": ("linear/",),
    "write": ("attend/", "runner/chunks/", "engine/batched/"),
    "uniform": ("sample/sample/", "runner/uniforms/", "engine/seeds/"),
    "leak": ("engine/batched/", "engine/cancel/"),
}
"""Fault -> beginnings of the names of checks, of each of which one fails."""


def test_without_a_fault_they_pass(card):
    """test_contract has all checks of the backend."""
    found = card("none", *sorted({each for every in FAULTS.values() for each in every}))
    assert found["failures"] == []
    assert found["sections"]["engine"]["passed"] > 2


@pytest.mark.parametrize("fault", FAULTS)
def test_each_injected_fault_is_detected(card, fault):
    failed = [failure["check"] for failure in card(fault, *FAULTS[fault])["failures"]]
    for beginning in FAULTS[fault]:
        assert any(name.startswith(beginning) for name in failed), failed
