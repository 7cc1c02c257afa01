"""``inl ops``."""

from __future__ import annotations

import json

import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.spec.op import CATALOG

BACKEND = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    register("npu", "fake_npu:make")

def make(device):
    raise RuntimeError("driver too old")
"""


@pytest.fixture
def rows(inl):
    done = inl("ops", "--device", "reference", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return {row["op"]: row for row in json.loads(done.stdout)}


def test_every_op_has_a_row(rows):
    import inl.ops

    assert inl.ops
    assert sorted(rows) == sorted(CATALOG)
    for name, spec in CATALOG.items():
        assert (rows[name]["kind"] == "composite") == spec.composite


def test_kernels_equal_those_of_the_backend(rows):
    found = {name for name, row in rows.items() if "reference" in row["kernels"]}
    backend = ReferenceBackend(Device("reference"))
    assert found == {kernel.op for kernel in backend.kernels()}


def test_signatures_are_as_a_caller_writes_them(rows):
    assert rows["rms_norm"]["signature"] == "(x, w, *, eps)"
    assert rows["gated_mlp"]["signature"] == "(x, w, *, activation)"  # without ops


def test_describe_one_op(inl):
    done = inl("ops", "rms_norm", "--device", "reference")
    assert done.stdout.startswith("rms_norm(x, w, *, eps)\n\n")
    assert CATALOG["rms_norm"].body.__doc__.splitlines()[0] in done.stdout
    assert "kernels    reference: numpy" in done.stdout


def test_the_body_of_an_op_is_its_function(inl):
    done = inl("ops", "soft_cap", "--body")
    assert done.stdout.startswith("def soft_cap(x: Array, *, cap: float)")
    assert "np.tanh" in done.stdout
    refused = inl("ops", "--body")
    assert refused.returncode == 2
    assert "--body: needs one op" in refused.stderr


def test_an_unknown_op_is_refused_with_the_list(inl):
    done = inl("ops", "rmsnorm")
    assert done.returncode == 2
    assert "there is no op 'rmsnorm'; did you mean 'rms_norm'? known: " in done.stderr
    assert "rms_norm" in done.stderr


def test_a_backend_that_fails_to_open_is_an_error_only_if_requested(inl, plugin):
    env = plugin(BACKEND)
    done = inl("ops", env=env)
    assert done.returncode == 0
    assert "inl: npu:0: plugin fake_npu (INL_PLUGINS): " in done.stderr
    assert "driver too old" in done.stderr
    assert "reference: numpy" in done.stdout
    assert inl("ops", "--device", "npu", env=env).returncode == 2
