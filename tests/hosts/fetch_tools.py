"""Fetches an emulator of 64-bit ARM, and a Python for it: ``fetch_tools.py FOLDER``.

From Debian: qemu-user, and Python with the libraries that it needs; from PyPI: NumPy,
and the packages of the tests. Nothing is installed. Needs ``apt-get`` and ``dpkg``.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

EMULATOR = ("qemu-user-static",)
PYTHON = (
    "libbz2-1.0", "libc6", "libexpat1", "libffi8", "libgcc-s1", "liblzma5",
    "libpython3.11-minimal", "libpython3.11-stdlib", "libssl3", "libstdc++6",
    "libuuid1", "python3.11-minimal", "zlib1g",
)  # fmt: skip
WHEELS = ("hypothesis", "numpy", "pluggy", "pytest", "pytest-timeout")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")


MIRROR = "http://deb.debian.org/debian"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def fetch_debian(packages, architecture, place, target, suites=()):
    """Unpack Debian packages of an architecture to ``target``; APT's state is apart.

    suites: releases of Debian, in place of the machine's own sources.
    """
    state = place / f"apt-{architecture}"
    debs = state / "debs"
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
    }
    if suites:
        sources = state / "sources.list"
        lines = [f"deb [signed-by={KEYS}] {MIRROR} {suite} main" for suite in suites]
        sources.write_text("\n".join(lines) + "\n", "utf-8")
        options |= {"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "-"}
    words = [f"-o{name}={value}" for name, value in options.items()]
    subprocess.run(["apt-get", "-q", *words, "update"], check=True)
    subprocess.run(
        ["apt-get", "-q", *words, "download", *packages], check=True, cwd=debs
    )
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", deb, target], check=True)


def fetch_wheels(place, target):
    """Unpack wheels for the emulated Python."""
    wheels = place / "wheels"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:",
            "--python-version", "3.11", "-d", wheels,
            *(f"--platform={each}" for each in PLATFORMS), *WHEELS,
        ],
        check=True,
    )  # fmt: skip
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


def main(place):
    place.mkdir(parents=True, exist_ok=True)
    fetch_debian(EMULATOR, "amd64", place, place / "emulator")
    fetch_debian(PYTHON, "arm64", place, place / "arm64")
    fetch_wheels(place, place / "site")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
