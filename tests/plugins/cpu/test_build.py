"""Builds of the native library: which instruction sets, and what is compiled again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from inl.errors import DeviceError
from inl_cpu import library
from inl_cpu.abi import ISAS

PACKAGE = Path(__file__).parents[3] / "plugins" / "inl-cpu"
LEAST = ("scalar",)

COMPILER = """#!/bin/sh
# Records its arguments, and writes the file that they name.
echo "$*" >> {log}
while [ $# -gt 0 ]; do
    case "$1" in -o) out=$2;; -MF) rules=$2;; *.cpp) source=$1;; esac
    shift
done
[ -z "$rules" ] || echo "object: $source" > "$rules"
case "$out" in
    */host) printf '#!/bin/sh\\necho {best}\\n' > "$out"; chmod +x "$out";;
    *) echo > "$out";;
esac
"""


@pytest.fixture
def builder():
    spec = importlib.util.spec_from_file_location("native", PACKAGE / "build_native.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compiler(builder, tmp_path, monkeypatch):
    """Make a compiler that compiles nothing; returns a function of what it compiled.

    ``best`` is the instruction set of its processor.
    """
    if os.name == "nt":
        pytest.skip("the compiler is a shell script")
    log = tmp_path / "log"

    def take():
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(
            Path(word).stem
            for line in lines
            if " -c " in line
            for word in line.split()
            if word.endswith(".cpp")
        )

    def make(best):
        script = tmp_path / "compiler"
        script.write_text(COMPILER.format(log=log, best=best))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return take

    return make


def isas(stems):
    return {stem.removeprefix("isa_") for stem in stems if stem.startswith("isa_")}


def test_a_build_for_the_host_compiles_its_instruction_set_only(
    builder, compiler, tmp_path
):
    compiled = compiler("avx_vnni")
    builder.build_for_host(tmp_path / "one.so", objects=tmp_path / "objects")
    assert isas(compiled()) == {"avx_vnni"}
    compiler("amx")
    builder.build_for_host(tmp_path / "two.so", objects=tmp_path / "objects")
    assert isas(compiled()) == {"avx512", "amx"}


def test_a_complete_build_stays_complete_for_the_host(builder, compiler, tmp_path):
    compiled = compiler("avx2")
    builder.build(tmp_path / "all.so", objects=tmp_path / "objects")
    assert isas(compiled()) == set(builder.SETS) == set(ISAS)
    builder.build_for_host(tmp_path / "all.so", objects=tmp_path / "objects")
    assert compiled() == []


def test_only_what_changed_is_compiled_again(builder, compiler, tmp_path):
    compiled, objects = compiler("avx2"), tmp_path / "objects"
    every = builder.compile_all(objects)
    assert set(compiled()) == set(every)
    builder.compile_all(objects)
    assert compiled() == []
    source = builder.SOURCES / "runtime" / "quant.cpp"
    os.utime(every["quant"], ns=(0, source.stat().st_mtime_ns - 1))
    builder.compile_all(objects)
    assert compiled() == ["quant"]
    builder.compile_all(objects, ("-O1",))
    assert set(compiled()) == set(every)
    builder.compile_all(objects, ("-O1",), sets=LEAST)
    assert compiled() == [builder.CHOICE]


def test_a_changed_header_compiles_its_sources_again(builder, tmp_path):
    header, source = tmp_path / "one.h", tmp_path / "one.cpp"
    header.write_text("#define ONE 1\n")
    source.write_text('#include "one.h"\nint one() { return ONE; }\n')
    target, command = tmp_path / "one.o", [*builder.all_flags(()), "-c"]
    try:
        builder.compile_source(source, target, command)
    except OSError as error:
        pytest.skip(f"no C++ compiler: {error}")
    assert builder.is_current(target, command)
    assert not builder.is_current(target, [*command, "-g"])
    after = target.stat().st_mtime_ns + 1
    os.utime(header, ns=(after, after))
    assert not builder.is_current(target, command)
    header.unlink()
    assert not builder.is_current(target, command)


def test_the_build_and_the_library_find_the_same_processor(builder):
    found = library.open_library()
    if found.library is None:
        pytest.skip(found.reason)
    if library.left_out(found.library):
        pytest.skip("the library is not complete")
    assert ISAS[found.library.inl_best_isa()] in builder.host_sets()


def test_a_compiler_for_another_system_builds_all(builder, compiler):
    compiler("avx2; exit 1")
    assert builder.host_sets() == builder.SETS


@pytest.fixture(scope="module")
def scalar(tmp_path_factory):
    """A library of a wrong build: it has the scalar kernels' table, but no kernels."""
    spec = importlib.util.spec_from_file_location("native", PACKAGE / "build_native.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = tmp_path_factory.mktemp("few") / "libinl.so"
    try:
        module.build(place, ("-O0",), sets=LEAST)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C++ compiler: {error}")
    return place


def test_what_a_build_lacks_is_said_with_the_command_that_builds_it(
    scalar, monkeypatch
):
    loaded = library.open_library(scalar)
    assert loaded.library is not None, loaded.reason
    lacks = library.left_out(loaded.library)
    assert "scalar" not in lacks
    assert lacks.endswith("; python plugins/inl-cpu/build_native.py builds all")
    (wanted, *_) = lacks.removeprefix("the native library was built without ").split(
        ", "
    )
    monkeypatch.setenv("INL_CPU_ISA", wanted)
    with pytest.raises(
        DeviceError, match=rf"'{wanted}', .* runs scalar; .*build_native\.py"
    ):
        library.select_isa(loaded.library)
    monkeypatch.setenv("INL_CPU_ISA", "scalar")
    assert library.select_isa(loaded.library) == ISAS.index("scalar")


def test_a_library_without_kernels_for_the_processor_is_refused(tmp_path, builder):
    try:
        place = builder.build(tmp_path / "libinl.so", ("-O0",), sets=())
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C++ compiler: {error}")
    loaded = library.open_library(place)
    assert loaded.library is None
    assert "none of its kernels run on this processor" in loaded.reason
    assert "build_native.py builds all" in loaded.reason


def build(kind, folder, tmp_path):
    """Run a hook of the package's build backend on a copy of the package."""
    code = f"from setuptools.build_meta import {kind} as b; print(b({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_a_wheel_has_every_instruction_set_and_an_editable_install_the_hosts(
    kind, builder, compiler, tmp_path
):

    folder = tmp_path / "inl-cpu"
    left = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", "*.so")
    shutil.copytree(PACKAGE, folder, ignore=left)
    compiled = compiler("avx2")
    wheel = build(kind, folder, tmp_path)
    every = kind == "build_wheel"
    assert isas(compiled()) == (set(builder.SETS) if every else {"avx2"})
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(builder.LIBRARY.name) for name in names) == every
