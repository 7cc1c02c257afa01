"""Build the native library in the source tree: ``python build_native.py``.

For development; wheels and editable installs build the same sources. ``CXX`` is the
compiler, which may have arguments (``python -m ziglang c++ -target aarch64-macos``),
``--output`` the library, ``--objects`` a folder that keeps the object files, and
further arguments are passed to the compiler (``-fsanitize=address``).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src" / "inl_cpu" / "native"
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

    chosen: list[str] = []
    for group in HARDENING:
        flags = (each.split() for each in group)
        chosen += next((each for each in flags if accepts(*each)), [])
    return tuple(chosen)


def all_flags(extra: tuple[str, ...]) -> list[str]:
    return [*compiler(), *FLAGS, *hardening(compiler()), *extra]


def compile_all(
    folder: Path, extra: tuple[str, ...] = (), *, jobs: int = 2
) -> dict[str, Path]:
    """Compile every source; returns the object files by the stem of their source.

    Raises ``CalledProcessError`` after the compiler has printed its errors.
    """

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        command = [*all_flags(extra), "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target

    sources = sorted(SOURCES.rglob("*.cpp"))
    with ThreadPoolExecutor(jobs) as pool:
        return {path.stem: path for path in pool.map(compiled, sources)}


def build(
    output: Path = LIBRARY,
    extra: tuple[str, ...] = (),
    *,
    jobs: int = 2,
    objects: Path | None = None,
) -> Path:
    """Build the library ``output``; raises ``CalledProcessError``.

    objects: folder that keeps the object files.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = objects or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        compiled = compile_all(folder, extra, jobs=jobs)
        built = output.with_suffix(f".{os.getpid()}.tmp")
        parts = [str(path) for path in compiled.values()]
        link = [*all_flags(extra), "-shared", *parts, "-o", str(built)]
        subprocess.run(link, check=True)
    # Renamed, because processes may have mapped the old file.
    built.replace(output)
    return output


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=LIBRARY)
    parser.add_argument("--objects", type=Path)
    known, extra = parser.parse_known_args(arguments)
    built = build(known.output, tuple(extra), objects=known.objects)
    sys.stdout.write(f"{built}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
