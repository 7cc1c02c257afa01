"""The contract classes, in a separate pytest run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

FILE = """
from inl.testing import Conformance

class TestFaulty(Conformance):
    device = "{device}"
    gaps = {gaps!r}
"""


@pytest.fixture
def contract(check, tmp_path):
    """Run a contract file for the faulty device; ``check`` has written its plugin."""

    def run(*words, gaps=(), fault="none", device="faulty:0", seed="3"):
        file = tmp_path / "test_contract.py"
        file.write_text(FILE.format(device=device, gaps=dict(gaps)))
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        plant = {"INL_PLUGINS": "faulty_plugin", "INL_FAULT": fault}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider",
             "-c", os.devnull, "--rootdir", str(tmp_path), *words, str(file)],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | plant | {"PYTHONPATH": path, "INL_CHECK_SEED": seed},
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


@pytest.mark.full
def test_a_correct_backend_passes_one_test_per_check(contract):
    code, said = contract()
    assert code == 0, said
    for name in (
        "test_backend[backend/plugin]",
        "test_kernel[rms_norm/heads/float32]",
        "test_kernel[attention/poison/padded/6/2x64/float32]",
        "test_runner[runner/feedback/float32]",
        "test_engine[engine/preemption/float32]",
        "test_every_gap_covers_a_check",
    ):
        assert re.search(rf"^PASSED .*::TestFaulty::{re.escape(name)}$", said, re.M)


@pytest.mark.full
def test_a_gap_is_an_expected_failure_with_its_reason(contract):
    gaps = {"linear": "driver 2.1 rounds as it should"}
    # Not by words of this test's name, which is in the path of all of the checks.
    only = "(linear/1x8x16 or linear/refusals) and not qkv and not adapted or covers"
    code, said = contract("-k", only, gaps=gaps, fault="bias")
    # The refusal checks are not affected by the fault and pass.
    expired = "linear/refusals/numpy passes: the gap 'linear' has expired"
    assert code == 1
    assert expired in said
    assert "XFAIL" in said
    assert "linear: driver 2.1 rounds as it should" in said


@pytest.mark.full
def test_gaps_that_cover_all_failures_pass(contract):
    reason = "driver 2.1 rounds as it should"
    cases = [
        "1x8x16", "2x5x3", "13x64x48", "33x96x160", "1x1030x64", "5x4099x48",
        "2x151939x8", "1x2048x1024", "6x1024x512",
    ]  # fmt: skip
    gaps = dict.fromkeys([f"linear/{case}" for case in cases], reason)
    only = "test_kernel and linear/ and not qkv and not adapted or covers"
    code, said = contract("-k", only, gaps=gaps, fault="bias")
    assert code == 0, said
    assert "26 xfailed" in said


@pytest.mark.full
def test_an_unknown_gap_fails(contract):
    code, said = contract("-k", "covers", gaps={"rms_nrom/heads": "soon"})
    assert code == 1
    assert "gap 'rms_nrom/heads': covers no check" in said


@pytest.mark.full
def test_an_unavailable_device_fails_with_the_reason(contract):
    code, said = contract(device="nobody:0")
    assert code == 1
    assert "BackendNotFound: no backend for nobody" in said
    for section in ("backend", "kernel", "runner", "blocks", "engine"):
        assert re.search(rf"^FAILED .*::test_{section}\[{section}/opens\]", said, re.M)


@pytest.mark.full
def test_the_seed_of_the_environment_is_used_and_checked(contract):
    code, said = contract("-k", "linear/1x8x16", fault="bias", seed="77")
    assert code == 1
    assert "seed 77" in said
    code, said = contract(seed="soon")
    assert code != 0
    assert "INL_CHECK_SEED: found 'soon'" in said


def test_the_kit_needs_pytest_only_for_the_contracts():
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import inl.testing.conformance, inl.testing.tiny, inl.testing\n"
        "try: inl.testing.KernelContract\n"
        "except inl.errors.MissingPackage as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert re.search(r"pip install .*core\[testing\]", done.stdout)
