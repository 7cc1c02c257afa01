"""No instruction of a wider set lies where a machine without it could come across."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest


@pytest.fixture(scope="module")
def objects(builder, tmp_path_factory):
    """Object files by the stem of their source."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not on the path")
    folder = tmp_path_factory.mktemp("objects")
    return builder.compile_all(folder)


def code_of(path):
    command = ["objdump", "-d", "--no-show-raw-insn", "-j", ".text", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sections_of(path):
    command = ["objdump", "-h", "-w", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[1] for line in done.stdout.splitlines() if " CODE" in line]


def test_files_for_any_machine_hold_nothing_wider(objects):
    for stem, path in objects.items():
        if stem.startswith("isa_") and stem != "isa_scalar":
            continue
        text = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(path)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert not re.search(r"%[yz]mm|%k[0-7]|\tv[a-z]", text), stem


def test_avx2_has_no_register_of_avx512(objects):
    for stem in ("isa_avx2", "isa_avx_vnni"):
        assert not re.search(
            r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])", code_of(objects[stem])
        )


@pytest.mark.parametrize("stem", ["isa_avx2", "isa_avx_vnni", "isa_avx512", "isa_amx"])
def test_a_wide_file_shares_no_code_with_others(objects, stem):
    """A function of the standard library, compiled for AVX-512 and merged by the
    linker with everybody's, would be an illegal instruction elsewhere."""
    shared = [name for name in sections_of(objects[stem]) if name.startswith(".text.")]
    plain = (".text.unlikely", ".text.startup", ".text.hot", ".text.exit")
    assert [name for name in shared if name not in plain] == []


def test_those_checks_can_fail(objects):
    assert re.search("%zmm", code_of(objects["isa_avx512"]))
    assert re.search("%ymm", code_of(objects["isa_avx2"]))
    shared = [name for name in sections_of(objects["pool"]) if ".text._Z" in name]
    assert shared
