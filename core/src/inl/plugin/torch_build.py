"""The installed build of torch, read from its files: importing it takes seconds."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from inl.errors import BackendUnavailable
from inl.plugin.frameworks import require_framework

RUNTIMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
"""Variable of ``torch/version.py`` -> name of the runtime that it is the version of."""

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
    """Return a note with the command ``install`` if Triton is missing, else ""."""
    if find_spec("triton") is not None:
        return ""
    return f"Triton is not installed: slower, by torch's kernels. Try: {install}"


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
