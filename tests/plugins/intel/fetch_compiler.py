"""Fetches the compilers for Intel GPUs: ``fetch_compiler.py FOLDER``.

From PyPI: Triton for Intel GPUs, which has torch's Triton's name and therefore a folder
of its own; from Debian: ocloc and Intel's graphics compiler. Nothing is installed.
Needs ``apt-get`` and ``dpkg``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRITON = "triton-xpu==3.3.0b1"
DEBIAN = (
    "intel-opencl-icd", "libclang-cpp14", "libigc1", "libigdfcl1", "libigdgmm12",
    "libllvm14", "libllvmspirvlib14", "libopencl-clang14",
)  # fmt: skip


def main(place):
    sys.path.insert(0, str(Path(__file__).parents[2] / "hosts"))
    from fetch_tools import fetch_debian

    place.mkdir(parents=True, exist_ok=True)
    fetch_debian(DEBIAN, "amd64", place, place / "debian")
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
