"""The installed build of torch, and of Triton, read from their files: importing torch
takes seconds.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from inl.errors import BackendUnavailable
from inl.plugin.frameworks import accepts, require_framework

RUNTIMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
"""Variable of ``torch/version.py`` -> name of the runtime that it is the version of."""

TRITON = "triton>=3.4"
"""Versions of Triton with all that the kernels import; torch 2.8 brings the first."""

ASSIGNED = re.compile(r"^(\w+)(?:: [^=]+)? = '([^']*)'$", re.MULTILINE)
"""A variable to which a string is assigned."""


class TorchBuild(NamedTuple):
    """Version of torch, and of the runtimes that it is built for."""

    version: str
    runtimes: dict[str, str]
    """Keys of :data:`RUNTIMES` -> version."""

    @property
    def built_for(self) -> str:
        """The runtimes and their versions, such as "built for ROCm 7.1.2"."""
        built = [f"{RUNTIMES[key]} {text}" for key, text in self.runtimes.items()]
        return f"built for {' and '.join(built) or 'CPUs only'}"

    def __str__(self) -> str:
        return f"torch {self.version}, {self.built_for}"


def require_torch(runtime: str, install: str, versions: str = "torch") -> TorchBuild:
    """Return the installed build of torch.

    versions: those accepted, such as "torch>=2.5". Raises :class:`BackendUnavailable`,
    with the command ``install``, where torch is not installed, is damaged, is not built
    for ``runtime``, is of another version, or cannot be imported.
    """
    build = installed_torch()
    if build is None:
        raise BackendUnavailable(f"torch is not installed. Try: {install}")
    if runtime not in build.runtimes:
        raise BackendUnavailable(
            f"found {build}; needs a build for {RUNTIMES[runtime]}. Try: {install}"
        )
    require_framework(versions, install, found=build.version)
    return build


def without_triton(install: str) -> str:
    """Return a note with the command ``install`` if Triton is missing or too old, else
    an empty string.
    """
    if reason := why_no_triton():
        return f"{reason}: slower, by torch's kernels. Try: {install}"
    return ""


def why_no_triton() -> str:
    """Return why Triton's kernels cannot be used; empty if they can. Does not import
    it: its version is read from its files, since its builds for AMD's and Intel's GPUs
    have other distribution names.
    """
    spec = find_spec("triton")
    if spec is None:
        return "Triton is not installed"
    try:
        values = dict(ASSIGNED.findall(Path(spec.origin or "").read_text("utf-8")))
    except (OSError, ValueError):
        return ""  # its import will tell
    version = values.get("__version__")
    if version is None or accepts(TRITON, version):
        return ""
    return f"found Triton {version}, needs {TRITON}"


def installed_torch() -> TorchBuild | None:
    """Return the installed build of torch, or ``None``; does not import it.

    Raises :class:`BackendUnavailable` where its files are damaged.
    """
    spec = find_spec("torch")
    if spec is None:
        return None
    file = Path(spec.origin or "torch").parent / "version.py"
    try:
        values = dict(ASSIGNED.findall(file.read_text("utf-8")))
        version = values["__version__"]
    except (OSError, ValueError, KeyError) as error:
        raise BackendUnavailable(
            f"torch is damaged: {file}: {type(error).__name__}: {error}; reinstall it"
        ) from error
    found = {key: text for key in RUNTIMES if (text := values.get(key))}
    return TorchBuild(version, found)
