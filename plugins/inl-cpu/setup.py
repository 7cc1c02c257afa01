"""Builds the native library if there is a C++ compiler.

With INL_BUILD_NATIVE=0 an editable install leaves it as it is in the source tree, for
who runs ``build_native.py`` at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from build_native import LIBRARY, SOURCES, build, build_for_host  # noqa: E402 - in this folder


class BuildNative(build_ext):
    """Builds a plain shared library that does not link to Python.

    A wheel may run on other processors, and has every instruction set; an editable
    install has that of this one.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}{LIBRARY.suffix}"

    def build_extension(self, ext: Extension) -> None:
        if self.editable_mode and os.environ.get("INL_BUILD_NATIVE") == "0":
            return
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self.editable_mode:
                build_for_host(output)
            else:
                build(output)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"the native library was not built: {error}") from error


class AnyPython(bdist_wheel):
    """Tags the wheel for every Python 3 of the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "inl_cpu.native.libinl",
            [str(path.relative_to(HERE)) for path in sorted(SOURCES.rglob("*.cpp"))],
            depends=[str(path.relative_to(HERE)) for path in SOURCES.rglob("*.h")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
