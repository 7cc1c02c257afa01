"""Fetches a Vulkan driver that computes on the CPU: ``fetch_vulkan.py FOLDER``.

From Debian: the Vulkan loader, and lavapipe of a Mesa with what WebGPU requires, which
Debian 12 has in its backports. Nothing is installed. Needs ``apt-get`` and ``dpkg``.
"""

from __future__ import annotations

import sys
from pathlib import Path

BACKPORTS = "bookworm-backports"
DRIVER = tuple(f"{name}/{BACKPORTS}" for name in ("libdrm2", "mesa-vulkan-drivers"))
LIBRARIES = (
    "libbsd0", "libedit2", "libelf1", "libexpat1", "libffi8", "libicu72", "libllvm15",
    "libmd0", "libtinfo6", "libvulkan1", "libwayland-client0", "libx11-xcb1", "libxau6",
    "libxcb-dri3-0", "libxcb-present0", "libxcb-randr0", "libxcb-shm0", "libxcb-sync1",
    "libxcb-xfixes0", "libxcb1", "libxdmcp6", "libxml2", "libxshmfence1", "libz3-4",
    "libzstd1", "zlib1g",
)  # fmt: skip


def main(place):
    sys.path.insert(0, str(Path(__file__).parents[2] / "hosts"))
    from fetch_tools import fetch_debian

    place.mkdir(parents=True, exist_ok=True)
    packages = (*DRIVER, *LIBRARIES)
    suites = ("bookworm", BACKPORTS)
    fetch_debian(packages, "amd64", place, place / "debian", suites=suites)
    (place / "complete").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
