"""64-bit ARM in an emulator: the kernels' tests, and the oracle's first case."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]
CASES = "tests/plugins/cpu/native"
MODULES = (
    "attention",
    "experts",
    "linear",
    "lora",
    "pack",
    "recurrent",
    "rows",
    "sample",
)
FEWEST = 4
"""Cases of the smallest module, for one instruction set."""

ORACLE = """
import json, os, platform
from pathlib import Path
from inl_cpu import library
place = Path(os.environ["INL_NATIVE_LIBRARY"])
library.open_library.__wrapped__.__defaults__ = (place,)
from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import default_model
case = json.loads(Path("tests/data/smollm2-oracle.json").read_text("utf-8"))["cases"][0]
config = EngineConfig(backend="cpu", dtype="float32", max_batch=1, context=256)
with InferenceEngine.from_pretrained(default_model(), config) as engine:
    found = engine.generate(case["prompt_ids"], max_tokens=len(case["token_ids"]))
print(platform.machine(), library.open_machine().isa)
print(list(found.token_ids) == case["token_ids"], found.text == case["text"])
"""


@pytest.mark.parametrize("module", MODULES)
def test_kernels_pass_their_tests(emulated, module):
    """At quick depth: the scalar kernels and NEON's."""
    done = emulated(
        *("-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "timeout=0"),
        f"{CASES}/test_{module}.py",
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    for isa in ("scalar", "neon"):
        names = re.findall(rf"\[.*\b{isa}\b.*\] PASSED", done.stdout)
        assert len(names) >= FEWEST, f"{isa}: {done.stdout[-5000:]}"


def test_a_wrong_kernel_result_fails(emulated):
    """The tests above can fail: a case with a result that is off by one."""
    code = (
        "import sys; sys.path.insert(0, 'tests/plugins/cpu/native'); import pytest; "
        "import native_harness as h; run = h.Native.run; "
        "h.Native.run = lambda self, *work: None; "
        "sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', "
        f"'{CASES}/test_rows.py']))"
    )
    assert emulated("-c", code).returncode == 1


def test_the_oracles_first_case(emulated):
    done = emulated("-c", ORACLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["aarch64", "neon", "True", "True"]
