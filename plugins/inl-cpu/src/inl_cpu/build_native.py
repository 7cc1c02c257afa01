"""Build the native library: ``inl build-kernels``, or ``python build_native.py``.

Wheels bring this file and the sources too, so that an installation without a library
can get one. It imports nothing of INL: a wheel is built in an environment without it.
``--host`` leaves out the instruction sets that this processor does not use and that are
yet to be compiled: an editable install takes no more, a wheel has all of them. ``CXX``
is the compiler, which may have arguments (``python -m ziglang c++ -target
aarch64-macos``), ``--output`` the library, and further arguments are passed to the
compiler (``-fsanitize=address``). Object files are kept, and compiled again when their
source, a header that it includes, or their command has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
# No contraction: a * b + c must round alike in every template.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    f"-I{SOURCES}",
)
NAMES = {"win32": "libinl.dll", "darwin": "libinl.dylib"}
LIBRARY = SOURCES / NAMES.get(sys.platform, "libinl.so")
"""Name by ``sys.platform``, as in ``inl_cpu.library``."""
PROJECT = Path(__file__).parents[2]
OBJECTS = PROJECT / "build" / "objects" if (PROJECT / "setup.py").exists() else None
"""Folder that keeps object files, in a source tree only."""
SETS = ("scalar", "avx2", "avx_vnni", "avx512", "amx", "neon")
"""Instruction sets, each compiled from ``isa/isa_NAME.cpp``; those of another
architecture are empty."""
SLOWEST = ("scalar", "neon", "avx512", "avx2", "avx_vnni")
CHOICE = "sets"
"""Stem of the source that knows which instruction sets are left out."""
HOST = """
#include <cstdio>
#include "runtime/cpu.h"
int main() {
    const char *names[] = {"scalar", "avx2", "avx512", "amx", "neon", "avx_vnni"};
    for (int isa : inl::BEST_FIRST)
        if (inl::processor_has(isa)) return std::puts(names[isa]) < 0;
}
"""
"""A program that prints the best instruction set of the processor."""
# Each is used if the compiler and the linker accept it, of a group the first.
HARDENING = (
    ("-fstack-protector-strong",),
    ("-fstack-clash-protection",),
    # CET on x86, BTI and PAC on ARM: valid targets of jumps and returns. Start files
    # without the mark would remove it from the library; shadow stacks need none of it.
    (
        "-fcf-protection=full -Wl,-z,shstk",
        "-fcf-protection=full",
        "-mbranch-protection=standard",
    ),
    # Distributions may predefine another level.
    ("-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3", "-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2"),
    ("-Wl,-z,relro,-z,now",),
    ("-Wl,-z,noexecstack",),
)
PROBE = '#include <cstring>\nextern "C" void f(char *p) { std::strcpy(p, "a"); }\n'


INSTALLERS = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "apk": "apk add g++",
    "pacman": "pacman -S gcc",
    "zypper": "zypper install gcc-c++",
    "xcode-select": "xcode-select --install",
}
"""Program of a system and the command that installs a C++ compiler there."""
ZIG = "pip install ziglang, and set CXX to: python -m ziglang c++"
"""A compiler from PyPI, for every system."""

Report = Callable[[int, int, str], None]
"""Called with the number of compiled files, that of all, and the name of the last."""


def why_no_compiler() -> str:
    """Return why there is no compiler, and what installs one; "" if there is one."""
    command = compiler()
    if command and shutil.which(command[0]):
        return ""
    tools = (INSTALLERS[name] for name in INSTALLERS if shutil.which(name))
    what = next(tools, ZIG)
    return f"no C++ compiler ({shlex.join(command)}) was found; try: {what}"


def show_progress(done: int, total: int, name: str) -> None:
    """Print a line for each file that was compiled."""
    sys.stderr.write(f"inl-cpu: compiled {done} of {total}: {name}\n")
    sys.stderr.flush()


def compiler() -> tuple[str, ...]:
    """Return the compiler and its arguments."""
    words = shlex.split(os.environ.get("CXX", "c++"), posix=os.name == "posix")
    return tuple(words)


@cache
def hardening(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags of ``HARDENING`` that the compiler accepts."""

    def accepts(*flags: str) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(PROBE)
            words = [*command, *FLAGS, "-Werror", *flags, "-shared", str(source)]
            target = ["-o", f"{folder}/probe.so"]
            return subprocess.run(words + target, capture_output=True).returncode == 0

    all_first = [flag for first, *_ in HARDENING for flag in first.split()]
    if accepts(*all_first):
        return tuple(all_first)
    chosen: list[str] = []
    for group in HARDENING:
        flags = (each.split() for each in group)
        chosen += next((each for each in flags if accepts(*each)), [])
    return tuple(chosen)


def all_flags(extra: tuple[str, ...]) -> list[str]:
    return [*compiler(), *FLAGS, *hardening(compiler()), *extra]


def command_of(
    source: Path, extra: tuple[str, ...], sets: tuple[str, ...]
) -> list[str]:
    """Return the command that compiles a source, without its files."""
    without = [name for name in SETS if name not in sets]
    flags = [f"-DINL_WITHOUT_{name.upper()}" for name in without]
    return [*all_flags(extra), *(flags if source.stem == CHOICE else ()), "-c"]


def is_current(target: Path, command: list[str]) -> bool:
    """Whether an object file is newer than all it was made of, by the same command."""
    record = target.with_suffix(".json")
    try:
        made = json.loads(record.read_text())
        built = target.stat().st_mtime_ns
        files = [Path(each).stat().st_mtime_ns for each in made["files"]]
    except (OSError, ValueError):
        return False
    return made["command"] == command and all(each <= built for each in files)


def compile_source(source: Path, target: Path, command: list[str]) -> None:
    """Compile a source.

    Files are renamed when they are complete: other processes may do the same.
    """
    began, record = time.time_ns(), target.with_suffix(".json")
    new = target.with_suffix(f".{os.getpid()}.tmp")
    rules = target.with_suffix(f".{os.getpid()}.d")
    depends = ["-MMD", "-MF", str(rules), "-MT", "object"]
    subprocess.run([*command, *depends, str(source), "-o", str(new)], check=True)
    # What changes during the compilation is newer than the object file.
    os.utime(new, ns=(began, began))
    files = shlex.split(rules.read_text().replace("\\\n", " ").partition(":")[2])
    rules.unlink()
    new.replace(target)
    written = record.with_suffix(f".{os.getpid()}.tmp")
    written.write_text(json.dumps({"command": command, "files": files}))
    written.replace(record)


def sources_of(sets: tuple[str, ...]) -> list[Path]:
    """Return the sources, those first that take longest to compile."""

    def effort(source: Path) -> tuple[int, int, str]:
        name = source.stem.removeprefix("isa_")
        longest = SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)
        return longest, -source.stat().st_size, source.name

    left_out = [f"isa_{name}" for name in SETS if name not in sets]
    sources = [path for path in SOURCES.rglob("*.cpp") if path.stem not in left_out]
    return sorted(sources, key=effort)


def compile_all(
    folder: Path,
    extra: tuple[str, ...] = (),
    *,
    jobs: int = 2,
    sets: tuple[str, ...] = SETS,
    report: Report = show_progress,
) -> dict[str, Path]:
    """Compile sources that changed; returns the object files by stem of their source.

    Raises ``CalledProcessError`` after the compiler has printed its errors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = sources_of(sets)
    objects = {path.stem: folder / f"{path.stem}.o" for path in sources}
    commands = {path: command_of(path, extra, sets) for path in sources}
    old = [
        path for path in sources if not is_current(objects[path.stem], commands[path])
    ]
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(compile_source, path, objects[path.stem], commands[path]): path
            for path in old
        }
        try:
            for done, each in enumerate(as_completed(running), 1):
                each.result()
                report(done, len(old), running[each].name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return objects


def compiled_sets(folder: Path, extra: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the instruction sets whose object files are current."""
    kept = (
        name
        for name in SETS
        if is_current(folder / f"isa_{name}.o", [*all_flags(extra), "-c"])
    )
    return tuple(kept)


def host_sets() -> tuple[str, ...]:
    """Return the instruction sets that this processor uses, by the library's own test.

    All of them if that cannot run here: the compiler makes code for another system.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "host.cpp", Path(folder) / "host"
        source.write_text(HOST)
        files = [str(source), str(SOURCES / "runtime" / "cpu.cpp"), "-o", str(program)]
        try:
            subprocess.run([*compiler(), *FLAGS, *files], check=True)
            found = subprocess.run([str(program)], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return SETS
    name = found.stdout.decode().strip()
    return ("avx512", "amx") if name == "amx" else (name,)


def build(
    output: Path = LIBRARY,
    extra: tuple[str, ...] = (),
    *,
    jobs: int = 2,
    objects: Path | None = None,
    sets: tuple[str, ...] = SETS,
    report: Report = show_progress,
) -> Path:
    """Build the library ``output``; raises ``CalledProcessError``.

    objects: folder that keeps the object files; ``None``: they are not kept. sets: the
    instruction sets; AMX needs AVX-512.
    """
    with _folder(objects) as folder:
        compiled = compile_all(folder, extra, jobs=jobs, sets=sets, report=report)
        built = output.with_suffix(f".{os.getpid()}.tmp")
        parts = [str(path) for path in compiled.values()]
        link = [*all_flags(extra), "-shared", *parts, "-o", str(built)]
        subprocess.run(link, check=True)
    # Renamed, because processes may have mapped the old file.
    built.replace(output)
    return output


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def build_for_host(
    output: Path = LIBRARY,
    extra: tuple[str, ...] = (),
    *,
    objects: Path | None = OBJECTS,
    report: Report = show_progress,
) -> Path:
    """Build the library for this processor, and with what is compiled already."""
    sets = {*host_sets(), *(compiled_sets(objects, extra) if objects else ())}
    chosen = tuple(name for name in SETS if name in sets)
    return build(output, extra, objects=objects, sets=chosen, report=report)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=LIBRARY)
    parser.add_argument("--objects", type=Path, default=OBJECTS)
    parser.add_argument("--host", action="store_true")
    known, extra = parser.parse_known_args(arguments)
    if reason := why_no_compiler():
        raise SystemExit(reason)
    built = (build_for_host if known.host else build)(
        known.output, tuple(extra), objects=known.objects
    )
    sys.stdout.write(f"{built}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
