"""Code for wider instruction sets is confined to their own sources."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[4] / "plugins/inl-cpu/build/objects"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def objects(builder, tmp_path_factory):
    """Object files by the stem of their source: those of ``make``, if up to date."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not on the path")
    if builder.compiled_sets(KEPT) == builder.SETS:
        return builder.compile_all(KEPT)
    return builder.compile_all(tmp_path_factory.mktemp("objects"))


def code_of(path):
    command = ["objdump", "-d", "--no-show-raw-insn", "-j", ".text", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sections_of(path):
    command = ["objdump", "-h", "-w", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[1] for line in done.stdout.splitlines() if " CODE" in line]


def test_baseline_sources_have_no_vector_extensions(objects):
    for stem, path in objects.items():
        if stem.startswith("isa_") and stem != "isa_scalar":
            continue
        text = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(path)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert not re.search(r"%[yz]mm|%k[0-7]|\tv[a-z]", text), stem


def test_avx2_sources_use_no_avx512_registers(objects):
    for stem in ("isa_avx2", "isa_avx_vnni"):
        assert not re.search(
            r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])", code_of(objects[stem])
        )


@pytest.mark.parametrize("stem", ["isa_avx2", "isa_avx_vnni", "isa_avx512", "isa_amx"])
def test_instruction_set_sources_share_no_functions(objects, stem):
    """The linker may keep the AVX-512 version of a shared standard library function,
    which would be an illegal instruction on other machines."""
    shared = [name for name in sections_of(objects[stem]) if name.startswith(".text.")]
    plain = (".text.unlikely", ".text.startup", ".text.hot", ".text.exit")
    assert [name for name in shared if name not in plain] == []


def test_the_checks_detect_violations(objects):
    assert re.search("%zmm", code_of(objects["isa_avx512"]))
    assert re.search("%ymm", code_of(objects["isa_avx2"]))
    shared = [name for name in sections_of(objects["pool"]) if ".text._Z" in name]
    assert shared
