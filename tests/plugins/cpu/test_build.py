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
BUILD = PACKAGE / "src" / "inl_cpu" / "build_native.py"
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
    spec = importlib.util.spec_from_file_location("native", BUILD)
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


def test_a_build_shows_a_line_for_each_file_that_it_has_compiled(
    builder, compiler, tmp_path, capsys
):
    compiled, objects = compiler("avx2"), tmp_path / "objects"
    builder.build(tmp_path / "all.so", objects=objects)
    counts, names = zip(
        *(line.rsplit(": ", 1) for line in capsys.readouterr().err.splitlines()),
        strict=True,
    )
    expected = compiled()
    assert sorted(Path(name).stem for name in names) == expected
    total = len(expected)
    assert counts == tuple(
        f"inl-cpu: compiled {done} of {total}" for done in range(1, total + 1)
    )
    builder.build(tmp_path / "all.so", objects=objects)
    assert capsys.readouterr().err == ""


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
    spec = importlib.util.spec_from_file_location("native", BUILD)
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
    assert lacks.endswith("; try: inl build-kernels --all")
    (wanted, *_) = lacks.removeprefix("the native library was built without ").split(
        ", "
    )
    monkeypatch.setenv("INL_CPU_ISA", wanted)
    with pytest.raises(
        DeviceError, match=rf"'{wanted}', .* runs scalar; .*build-kernels"
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
    assert "build-kernels --all" in loaded.reason


LEFT = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", "*.so")


def run_backend(kind, tmp_path):
    """Run a hook of the package's build backend on a copy of the package."""
    folder = tmp_path / "inl-cpu"
    shutil.copytree(PACKAGE, folder, ignore=LEFT)
    (folder / "src/inl_cpu/native" / library.LIBRARY_PATH.name).touch()
    code = f"from setuptools.build_meta import {kind} as b; print(b({str(tmp_path)!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def build(kind, tmp_path):
    """Return what the hook builds."""
    done = run_backend(kind, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if os.environ.get("INL_BUILD_NATIVE") != "0":
        assert "inl-cpu: compiled 1 of " in done.stderr  # which `pip -v` shows
    return tmp_path / done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_a_wheel_has_every_instruction_set_and_an_editable_install_the_hosts(
    kind, builder, compiler, tmp_path
):
    compiled = compiler("avx2")
    wheel = build(kind, tmp_path)
    every = kind == "build_wheel"
    assert isas(compiled()) == (set(builder.SETS) if every else {"avx2"})
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(builder.LIBRARY.name) for name in names) == every
    if every:
        assert "-py3-none-any" not in wheel.name
        assert "inl_cpu/native/isa/isa_scalar.cpp" in names


@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_without_a_compiler_nothing_is_installed(kind, tmp_path, monkeypatch):
    """pip would cache a wheel without the library, and use it when there is one."""
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    done = run_backend(kind, tmp_path)
    assert done.returncode != 0
    (line,) = [each for each in done.stderr.splitlines() if "not installed" in each]
    assert "no C++ compiler (no-such-compiler -x) was found; try: " in line
    assert "or set INL_BUILD_NATIVE=0, install, and run this later" in line
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_a_compiler_that_fails_installs_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    done = run_backend(kind, tmp_path)
    assert done.returncode != 0
    sentence = "inl-cpu is not installed: the compiler, false, failed with status 1"
    assert sentence in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_a_wheel_without_a_library_was_asked_for_and_is_for_every_platform(
    tmp_path, monkeypatch
):
    """pip takes a wheel for the platform first. A library in the tree is left out."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("INL_BUILD_NATIVE", "0")
    wheel = build("build_wheel", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".dylib", ".dll"))]
    assert {"inl_cpu/build_native.py", "inl_cpu/native/isa/isa_scalar.cpp"} <= {*names}


BUILD_INSTALLED = """
from inl.errors import BackendUnavailable
from inl_cpu.build_kernels import build_kernels
try: print(build_kernels())
except BackendUnavailable as error: print("refused:", error)
"""


def test_an_installation_without_a_library_gets_one(compiler, tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    shutil.copytree(PACKAGE / "src" / "inl_cpu", site / "inl_cpu", ignore=LEFT)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)

    def installed():
        words = [sys.executable, "-c", BUILD_INSTALLED]
        return subprocess.run(words, capture_output=True, text=True, timeout=300)

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert installed().stdout.startswith("refused: no C++ compiler (no-such-compiler)")
    monkeypatch.setenv("CXX", "false")
    assert "the compiler, false, failed with status 1" in installed().stdout
    compiled = compiler("avx2")
    done = installed()
    place = site / "inl_cpu" / "native" / library.LIBRARY_PATH.name
    assert done.stdout.strip() == str(place)
    assert place.exists()
    count = len(compiled())
    lines = [each for each in done.stderr.splitlines() if "inl-cpu: compiled" in each]
    assert len(lines) == count
    assert lines[-1].startswith(f"inl-cpu: compiled {count} of {count}: ")
    assert not list(tmp_path.glob("**/*.o")), "object files are not left there"
