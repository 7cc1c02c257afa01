"""Fetches the compilers for Intel GPUs: ``fetch_compiler.py FOLDER``.

From PyPI: Triton for Intel GPUs, which has torch's Triton's name and therefore a folder
of its own; from Debian: ocloc and Intel's graphics compiler, with the C library that
they need. Nothing is installed. Needs ``apt-get`` and ``dpkg``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRITON = "triton-xpu==3.3.0b1"
DEBIAN = ("intel-ocloc", "libc6", "libgcc-s1", "libigc2", "libstdc++6", "zlib1g")
SUITE = "sid"
"""Debian's development branch, since its last stable release has no ocloc."""


def main(place):
    sys.path.insert(0, str(Path(__file__).parents[2] / "hosts"))
    from fetch_tools import fetch_debian

    place.mkdir(parents=True, exist_ok=True)
    fetch_debian(DEBIAN, "amd64", place, place / "debian", suites=(SUITE,))
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile",
            "--upgrade", "--target", place / "site", TRITON,
        ],
        check=True,
    )  # fmt: skip
    (place / "complete").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
