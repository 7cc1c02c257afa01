"""``inl check tpu:0`` on JAX's CPU platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CHECK = """
import sys
{plant}
from inl.cli.main import main
sys.exit(main(["check", "tpu:0", "--json", *sys.argv[1:]]))
"""

WRONG_NORM = """
from dataclasses import replace
from inl_jax import xla
def wrong(x, w, *, eps):
    return right.run(x, w, eps=2 * eps + 0.1)
right = next(kernel for kernel in xla.KERNELS if kernel.op == "rms_norm")
xla.KERNELS = tuple(
    replace(right, run=wrong) if kernel is right else kernel for kernel in xla.KERNELS
)
"""


def check(*arguments, plant="", status=0):
    """Returns the capability card."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(plant=plant), *arguments],
        capture_output=True, text=True, timeout=3000,
        env=os.environ | {"INL_TPU_PLATFORM": "cpu"},
    )  # fmt: skip
    card = json.loads(done.stdout) if done.stdout else {"failures": [done.stderr]}
    assert done.returncode == status, card["failures"]
    return card


def test_kernels_keep_their_promises():
    """Of two ops; test_xla_kernels has the cases of each."""
    ops = ("attention", "rms_norm")
    card = check(*(part for op in ops for part in ("--op", op)))
    assert card["failures"] == []
    for op in ops:
        assert card["ops"][op]["kernels"] == ["xla"]


def test_a_wrong_kernel_is_found():
    card = check("--op", "rms_norm", plant=WRONG_NORM, status=1)
    assert card["failures"]
    assert "rms_norm" in str(card["failures"])


@pytest.mark.long
def test_every_promise_is_kept():
    assert check()["failures"] == []


@pytest.mark.long
def test_every_promise_is_kept_with_more_seeds_and_sizes():
    assert check("--full")["failures"] == []
