"""Hardening of the native library: what its ELF file says, and the choice of flags."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys

import elf_file
import pytest
from elf_file import ElfFile

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="this system has no ELF files"
)

FUNCTION = 2
LANDINGS = {
    elf_file.X86_64: (b"\xf3\x0f\x1e\xfa",),  # endbr64
    # bti c, paciasp
    elf_file.AARCH64: (struct.pack("<I", 0xD503245F), struct.pack("<I", 0xD503233F)),
}
OVERFLOW = """
#include <cstring>
extern "C" __attribute__((visibility("default"))) int f(const char *p, size_t n) {
    char copy[32];
    std::memcpy(copy, p, n);
    return copy[n / 2];
}
"""


@pytest.fixture(scope="module")
def elf(place):
    return ElfFile(place)


def test_relocations_are_resolved_at_load_and_then_read_only(elf):
    assert len(elf.of_kind(elf_file.GNU_RELRO)) == 1
    assert (
        elf.dynamic.get(elf_file.FLAGS, 0) & elf_file.BIND_NOW
        or elf.dynamic.get(elf_file.GNU_FLAGS, 0) & elf_file.NOW
    )
    assert elf_file.TEXTREL not in elf.dynamic


def test_no_memory_is_writable_and_executable(elf):
    (stack,) = elf.of_kind(elf_file.GNU_STACK)
    assert not stack.flags & elf_file.EXECUTE
    both = elf_file.EXECUTE | elf_file.WRITE
    assert all(each.flags & both != both for each in elf.of_kind(elf_file.LOAD))


def test_stacks_are_protected(elf):
    assert "__stack_chk_fail" in elf.imports()


def test_functions_begin_with_a_landing_for_indirect_calls(elf):
    if elf.machine not in LANDINGS:
        pytest.skip(f"machine {elf.machine} has no such instruction")
    exported = [
        symbol
        for symbol in elf.symbols()
        if symbol.section and symbol.kind == FUNCTION and symbol.name[:4] == "inl_"
    ]
    assert len(exported) > 10
    for symbol in exported:
        at = elf.offset(symbol.address)
        assert elf.data[at : at + 4] in LANDINGS[elf.machine], symbol.name


def test_shadow_stacks_are_permitted(elf):
    if elf.machine != elf_file.X86_64:
        pytest.skip("only x86 marks libraries for shadow stacks")
    assert elf.x86_features() & elf_file.SHSTK


def test_copies_are_checked(builder, tmp_path):
    """The library itself copies into no array of a known size."""
    built = compiled(builder, tmp_path, builder.all_flags(()))
    assert {"__memcpy_chk", "__stack_chk_fail"} <= built.imports()


def compiled(builder, folder, command):
    (folder / "overflow.cpp").write_text(OVERFLOW)
    files = ["-shared", str(folder / "overflow.cpp"), "-o", str(folder / "overflow.so")]
    subprocess.run([*command, *files], check=True)
    return ElfFile(folder / "overflow.so")


def test_these_checks_can_fail(builder, tmp_path):
    plain = ["-fno-stack-protector", "-U_FORTIFY_SOURCE"]
    plain += ["-Wl,-z,norelro,-z,lazy,-z,execstack"]
    built = compiled(builder, tmp_path, [*builder.compiler(), *builder.FLAGS, *plain])
    assert not {"__memcpy_chk", "__stack_chk_fail"} & built.imports()
    assert not built.of_kind(elf_file.GNU_RELRO)
    assert not built.dynamic.get(elf_file.FLAGS, 0) & elf_file.BIND_NOW
    assert built.of_kind(elf_file.GNU_STACK)[0].flags & elf_file.EXECUTE
    assert not built.x86_features() & elf_file.SHSTK


def test_flags_that_the_compiler_refuses_are_left_out(builder, tmp_path):
    real = shutil.which(builder.compiler()[0])
    old = tmp_path / "c++"
    refused = "*FORTIFY_SOURCE=3*|*shstk*|*clash*|*branch*"
    old.write_text(
        f'#!/bin/sh\ncase "$*" in {refused}) exit 1;; esac\nexec {real} "$@"\n'
    )
    old.chmod(0o755)
    chosen = builder.hardening((str(old),))
    assert "-D_FORTIFY_SOURCE=2" in chosen
    assert "-D_FORTIFY_SOURCE=3" not in chosen
    assert "-fstack-clash-protection" not in chosen
    assert "-fstack-protector-strong" in chosen
    assert builder.hardening(("/bin/false",)) == ()
