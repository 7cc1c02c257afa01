"""One virtual environment a peer, at pinned versions, made once and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from peers.catalog import LLAMA_VERSION
from peers.commands import Failed, run_logged
from peers.instructions import build_options

INSTALL_SECONDS = 3600


def python_of(environment: Path) -> Path:
    """Give the interpreter of a virtual environment."""
    if os.name == "nt":
        return environment / "Scripts" / "python.exe"
    return environment / "bin" / "python"


def environment(
    cache: Path,
    name: str,
    requirements: tuple[str, ...],
    removed: tuple[str, ...] = (),
) -> Path:
    """Make an environment, unless it is there; gives its interpreter.

    The name holds a digest of the requirements, and the interpreter's version. Raises
    :class:`Failed`; a half-made environment is taken for none.
    """
    text = "\n".join([sys.version, *requirements, *removed])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    folder = cache / "environments" / f"{name}-{digest}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _create(folder)
        _pip(folder, cache, name, "install", *requirements)
        if removed:
            _pip(folder, cache, name, "uninstall", "-y", *removed)
        (folder / "complete").touch()
    return python_of(folder)


def inl_environment(cache: Path, checkout: Path) -> Path:
    """Make INL's environment from a checkout, anew each time: its code changes.

    ``inl-torch`` is installed only where the CPU backend asks for it, as with pip.
    """
    plugin = checkout / "plugins" / "inl-cpu"
    project = tomllib.loads((plugin / "pyproject.toml").read_text("utf-8"))["project"]
    wants_torch = any("inl-torch" in each for each in project.get("dependencies", ()))
    packages = [f"{checkout / 'core'}[cli]", str(plugin)]
    packages += [str(checkout / "libs" / "inl-torch")] if wants_torch else []
    folder = cache / "environments" / "inl"
    if not python_of(folder).exists():
        _create(folder)
    constraints = checkout / "constraints.txt"
    _pip(folder, cache, "inl", "install", "-c", str(constraints), *packages)
    # A version that is there already would be kept, however old its code.
    fresh = ["--force-reinstall", "--no-deps"]
    _pip(folder, cache, "inl", "install", *fresh, *packages)
    return python_of(folder)


def llama_server(cache: Path, python: Path, isa: str | None = None) -> Path:
    """Build llama.cpp's server from the source that llama-cpp-python brings.

    isa: of :data:`peers.instructions.ISAS`, in a folder of its own. Without it for this
    machine's own instructions; where such a build meets one that the machine
    claims and does not have (some virtual machines), for the common ones among those
    it claims. Raises :class:`Failed`.
    """
    folder = cache / "-".join(filter(None, ("llama.cpp", LLAMA_VERSION, isa)))
    program = folder / "build" / "bin" / "llama-server"
    if (folder / "complete").exists():
        return program
    log = cache / "logs" / "llama.cpp.log"
    options = build_options(isa) if isa else ["-DGGML_NATIVE=ON"]
    _build(folder, python, options, log)
    return program


def build_portable(cache: Path, python: Path) -> None:
    """Build again without the instructions that virtual machines often only claim."""
    folder = cache / f"llama.cpp-{LLAMA_VERSION}"
    _build(folder, python, portable_flags(), cache / "logs" / "llama.cpp.log")
    (folder / "portable").touch()


def is_portable(cache: Path) -> bool:
    """Whether the server had to be built without some instructions."""
    return (cache / f"llama.cpp-{LLAMA_VERSION}" / "portable").exists()


FLAGS = {
    "sse4_2": "SSE42",
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
"""Flags of Linux' /proc/cpuinfo and ggml's names; no AMX and no float16 arithmetic."""


def portable_flags(cpuinfo: str | None = None) -> list[str]:
    """Give ggml's options for the instructions in a text such as /proc/cpuinfo."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    found = set(cpuinfo.split())
    named = [f"-DGGML_{name}=ON" for flag, name in FLAGS.items() if flag in found]
    return ["-DGGML_NATIVE=OFF", *named]


def _build(folder: Path, python: Path, options: list[str], log: Path) -> None:
    source = folder / "source"
    if not source.exists():
        _unpack(folder, python, log)
    off = ["TESTS", "EXAMPLES", "APP", "UI"]
    switches = [f"-DLLAMA_BUILD_{name}=OFF" for name in off]
    switches += ["-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"]
    tools = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    build = folder / "build"
    cmake = python.with_name("cmake")
    configure = [cmake, "-S", source / "vendor" / "llama.cpp", "-B", build]
    configure += ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *switches, *options]
    target = [cmake, "--build", build, "--target", "llama-server"]
    for command in (configure, target):
        run_logged(command, log, limit=INSTALL_SECONDS, environment=tools)
    (folder / "complete").touch()


def _unpack(folder: Path, python: Path, log: Path) -> None:
    """Fetch the source distribution; pip asks its build backend for its metadata."""
    name = "llama-cpp-python"
    command = [python, "-m", "pip", "download", "--no-deps", "-d", folder / "sdist"]
    command += ["--no-binary", name, f"{name}=={LLAMA_VERSION}"]
    run_logged(command, log, limit=INSTALL_SECONDS)
    (archive,) = (folder / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        # Early versions of Python 3.11 have no filters.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(folder / "unpacked", **safe)
    (inner,) = (folder / "unpacked").iterdir()
    inner.rename(folder / "source")


def _create(folder: Path) -> None:
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failed(f"no virtual environment: {error}") from error


def _pip(folder: Path, cache: Path, name: str, *arguments: str) -> None:
    pip = [python_of(folder), "-m", "pip", "--disable-pip-version-check", "-q"]
    log = cache / "logs" / f"install-{name}.log"
    run_logged([*pip, *arguments], log, limit=INSTALL_SECONDS)
