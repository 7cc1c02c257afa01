"""Doctor: Python, packages, plugins and devices."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, NamedTuple

from inl.cli.checks import Check, Status
from inl.cli.devices import show_bytes
from inl.device import DeviceType
from inl.errors import InlError
from inl.plugin import choose_device, make_backend, registry

OLDEST: Final = (3, 11)


class Package(NamedTuple):
    """A distribution that INL uses."""

    name: str
    least: tuple[int, ...]
    extra: str
    """Extra of inl-core that installs it; empty for what the core needs."""
    use: str
    needed: bool
    """Whether the default model cannot do without it."""


PACKAGES: Final = (
    Package("numpy", (1, 26), "", "numbers", True),
    Package("pluggy", (1, 5), "", "plugins", True),
    Package("tokenizers", (0, 20), "text", "text to tokens", True),
    Package("jinja2", (3, 1, 6), "text", "chat templates", True),
    Package("typer", (0, 15), "cli", "this command line", True),
    Package("rich", (13,), "cli", "tables and progress bars", False),
    Package("huggingface-hub", (0,), "hub", "models by name, org/name", False),
    Package("matplotlib", (3, 8), "plot", "inl bench --plot", False),
)

HARDWARE: Final = {
    "cuda": ("/dev/nvidiactl", "an NVIDIA driver"),
    "rocm": ("/dev/kfd", "an AMD driver"),
    "tpu": ("/dev/accel0", "a TPU"),
    "directml": ("/dev/dxg", "DirectX of WSL"),
}
"""Device types and a file that is there with their driver."""


def package_checks() -> Iterator[Check]:
    """Python, what is installed, what it serves, and the device that auto takes."""
    yield _python(sys.version_info[:3])
    for package in PACKAGES:
        yield _package(package, _version(package.name))
    yield from _plugins()
    yield from _devices()
    yield from _unserved(lambda path: Path(path).exists())
    yield from _torch(lambda path: Path(path).exists())
    yield _auto()


def _python(found: tuple[int, ...]) -> Check:
    version = ".".join(map(str, found))
    if found < OLDEST:
        return Check("wrong", "Python", version, "install Python 3.11 or newer")
    return Check("ok", "Python", f"{version} ({platform.machine()})")


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _package(package: Package, version: str | None) -> Check:
    wanted = f"inl-core[{package.extra}]" if package.extra else "inl-core"
    mend = f"pip install -U '{wanted}'"
    bad: Status = "wrong" if package.needed else "warn"
    if version is None:
        found = f"not installed: {package.use}"
        return Check(bad, package.name, found, mend)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < package.least:
        least = ".".join(map(str, package.least))
        found = f"{version}, which is older than {least}"
        return Check(bad, package.name, found, mend)
    return Check("ok", package.name, version)


def _plugins() -> Iterator[Check]:
    for row in registry().plugins:
        what, package = f"plugin {row.name}", row.distribution or row.source
        if row.status == "broken":
            mend = f"pip install --force-reinstall {package}"
            if row.distribution is None:
                mend = "look at INL_PLUGINS, then: inl --debug plugins"
            yield Check("warn", what, f"broken: {row.detail}", mend)
        elif row.status == "unsupported":
            mend = f"pip install -U {package} inl-core"
            yield Check("warn", what, row.detail, mend)
        elif row.status == "ready":
            yield Check("ok", what, row.detail)


def _devices() -> Iterator[Check]:
    for row in registry().devices():
        if row.info is not None:
            memory = show_bytes(row.info.memory_bytes)
            found = ", ".join(filter(None, (row.info.name, memory)))
            yield Check("ok", f"device {row.type}:{row.info.index}", found)
        else:
            mend = f"mend that, or: pip uninstall {row.origin.distribution}"
            yield Check(
                "warn",
                f"device {row.type}",
                row.reason or "not there",
                mend if row.origin.distribution else "look at INL_PLUGINS",
            )


def _unserved(exists: Callable[[str], bool]) -> Iterator[Check]:
    """Hardware that nobody serves."""
    known = registry()
    for kind, (path, what) in HARDWARE.items():
        if kind not in known.types and exists(path):
            yield Check(
                "warn",
                f"device {kind}",
                f"{what} is here ({path}), and no backend for {kind} is installed",
                known.advice(DeviceType(kind)).removeprefix("try: "),
            )


def _torch(exists: Callable[[str], bool]) -> Iterator[Check]:
    """A build of torch for a GPU that is not here takes gigabytes for nothing."""
    version = _version("torch")
    if version is None:
        return
    drivers = [path for path, _ in HARDWARE.values()]
    size = installed_bytes("torch")
    carried = [name for name in _required("torch") if name.startswith("nvidia-")]
    size += sum(map(installed_bytes, carried))
    build = f"{version}, {show_bytes(size)}"
    if "+cpu" in version or not size or not any(map(_version, carried)):
        yield Check("ok", "torch", build)
    elif any(map(exists, drivers)):
        yield Check("ok", "torch", f"{build}, with CUDA")
    else:
        yield Check(
            "warn",
            "torch",
            f"{build}: a CUDA build, and there is no GPU",
            "pip uninstall torch, then its CPU build from PyTorch's own index",
        )


def _required(name: str) -> list[str]:
    lines = distribution(name).requires or []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines]


def installed_bytes(name: str) -> int:
    """Bytes that a distribution says it installed; 0 where it is not there."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return 0
    return sum(file.size or 0 for file in files)


def _auto() -> Check:
    try:
        device = choose_device("auto")
    except InlError as error:
        return Check("wrong", "device auto", str(error), "pip install inl-cpu")
    try:
        backend = make_backend(device)
    except InlError as error:
        return Check("wrong", "device auto", str(error), "inl --debug explain")
    dtypes = ", ".join(backend.traits.dtypes)
    return Check("ok", "device auto", f"{device} opens and computes in {dtypes}")
