"""Systems that the native library is compiled for by the Zig compiler."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins" / "inl-cpu"
PLACE = ROOT / ".hosts"
"""Tools and libraries of ``make test-hosts``."""


class Host(NamedTuple):
    """A target of the Zig compiler, and the file name of its libraries."""

    target: str
    name: str


HOSTS = {
    "linux-arm64": Host("aarch64-linux-gnu.2.28", "libinl.so"),
    "macos-arm64": Host("aarch64-macos", "libinl.dylib"),
    "windows-x64": Host("x86_64-windows-gnu", "libinl.dll"),
}
