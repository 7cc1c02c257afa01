"""Builds the native library; without a C++ compiler the installation fails.

pip caches wheels: one without the library would be used again when there is a compiler.
With INL_BUILD_NATIVE=0 nothing is compiled. A wheel is then for every platform, so that
one with the library is preferred to it, and ``inl build-kernels`` compiles where it is
installed. An editable install leaves the library as it is in the source tree, for who
runs ``build_native.py`` at the same time.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
WITHOUT = os.environ.get("INL_BUILD_NATIVE") == "0"
SPEC = importlib.util.spec_from_file_location(
    "build_native", HERE / "src" / "inl_cpu" / "build_native.py"
)
native = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(native)


def require_compiler() -> None:
    """Exit with a sentence, which pip shows, if there is no compiler."""
    if reason := native.why_no_compiler():
        raise SystemExit(
            f"inl-cpu is not installed: {reason}; or set INL_BUILD_NATIVE=0, install, "
            "and run this later: inl build-kernels"
        )


class BuildNative(build_ext):
    """Builds a plain shared library that does not link to Python.

    A wheel may run on other processors, and has every instruction set; an editable
    install has that of this one.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}{native.LIBRARY.suffix}"

    def build_extension(self, ext: Extension) -> None:
        require_compiler()
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self.editable_mode:
                native.build_for_host(output)
            else:
                native.build(output, objects=native.OBJECTS)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"inl-cpu is not installed: the compiler, {error.cmd[0]}, failed with "
                f"status {error.returncode}; its errors are above"
            ) from error


class AnyPython(bdist_wheel):
    """Tags the wheel for every Python 3 of the platform."""

    def run(self) -> None:
        if not WITHOUT:
            require_compiler()  # before pages about copied files
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "any" if WITHOUT else super().get_tag()[2]


def files(pattern: str) -> list[str]:
    return [
        str(each.relative_to(HERE)) for each in sorted(native.SOURCES.rglob(pattern))
    ]


LIBRARY = Extension("inl_cpu.native.libinl", files("*.cpp"), depends=files("*.h"))
setup(
    ext_modules=[] if WITHOUT else [LIBRARY],
    # A library that is in the source tree is for this system.
    exclude_package_data={"inl_cpu": ["native/libinl.*"]} if WITHOUT else {},
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
