"""The native library, compiled for other systems: format, machine and symbols."""

from __future__ import annotations

import re

import pytest

from cross_hosts import HOSTS, PACKAGE

lief = pytest.importorskip("lief", reason="reads the libraries: make test-hosts")
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
HEADER = PACKAGE / "src/inl_cpu/native/runtime/inl.h"
FORMATS = {
    "linux-arm64": ("ELF", "AARCH64"),
    "macos-arm64": ("MACHO", "ARM64"),
    "windows-x64": ("PE", "AMD64"),
}
SYSTEM = re.compile(
    r"lib(c|m|pthread|dl)\.so\.\d|ld-linux-aarch64\.so\.1"
    r"|/usr/lib/libSystem\.B\.dylib"
    r"|(KERNEL32|ntdll|ADVAPI32)\.dll|api-ms-win-crt-[\w-]+\.dll",
    re.IGNORECASE,
)
"""Libraries that every system of the three has."""

RUNTIME = re.compile(r"_init|_fini|_+dso_handle|_mh_dylib_header|_?Z(n[wa]|d[la]).*")
"""Start files, and the C++ operators ``new`` and ``delete``, which macOS exports."""


def is_own_name(library):
    """Whether an entry of a Mach-O file is the file's own name."""
    return "ID_DYLIB" in str(getattr(library, "command", ""))


def declared():
    """Functions that the header exports."""
    return set(re.findall(r"INL_EXPORT[^;]*?\b(inl_\w+)\(", HEADER.read_text()))


def exported(binary):
    """Names of exported functions, without the underscore of macOS."""
    names = {str(each.name) for each in binary.exported_functions}
    return {name.removeprefix("_") for name in names}


@pytest.fixture(params=HOSTS)
def name(request):
    return request.param


@pytest.fixture
def binary(library, name):
    return lief.parse(str(library(name)))


def test_the_format_is_that_of_the_system(binary, name):
    machine = (
        getattr(binary.header, "machine", None)
        or getattr(binary.header, "machine_type", None)
        or binary.header.cpu_type
    )
    found = binary.format.name, machine.name
    assert found == FORMATS[name]


def test_exported_functions_equal_those_of_the_header_and_of_linux(binary, name):
    built = PACKAGE / "src/inl_cpu/native/libinl.so"
    native = {each for each in exported(lief.parse(str(built))) if each[:4] == "inl_"}
    assert len(declared()) == 13
    assert native == declared()
    found = exported(binary)
    others = {each for each in found if each[:4] != "inl_"}
    assert [each for each in others if not RUNTIME.fullmatch(each)] == []
    assert {each for each in found if each[:4] == "inl_"} == native


def test_only_libraries_of_the_system_are_needed(binary):
    commands = [each for each in binary.libraries if not is_own_name(each)]
    needed = [getattr(each, "name", each) for each in commands]
    assert needed
    assert [each for each in needed if not SYSTEM.fullmatch(each)] == []
