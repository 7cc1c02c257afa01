"""Checks of ``inl doctor``: Python, packages, plugins and devices."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final, NamedTuple

import inl
from inl.cli.checks import Check, Status
from inl.cli.devices import show_bytes
from inl.device import DeviceType
from inl.errors import InlError
from inl.install_command import install_command, installed_from, pip_command
from inl.plugin import choose_device, make_backend, registry

OLDEST_PYTHON: Final = (3, 11)


class Package(NamedTuple):
    """A distribution that INL uses."""

    name: str
    oldest: tuple[int, ...]
    requirement: str
    """What to install."""
    use: str
    required: bool
    """Whether the default model needs it."""


PACKAGES: Final = (
    Package("numpy", (1, 26), "inl-core", "arrays", True),
    Package("pluggy", (1, 5), "inl-core", "plugins", True),
    Package("tokenizers", (0, 20), "inl-core[text]", "tokenization", True),
    Package("jinja2", (3, 1, 6), "inl-core[text]", "chat templates", True),
    Package("typer", (0, 15), "inl-core[cli]", "the command line", True),
    Package("rich", (13,), "inl-core[cli]", "tables and progress bars", False),
    Package("huggingface-hub", (0,), "inl-core[hub]", "models by name", False),
    Package("matplotlib", (3, 8), "inl-core[plot]", "inl bench --plot", False),
    Package("inl-toolkit", (0, 1), "inl-toolkit", "inl.nn, inl.kernels", False),
)

HARDWARE: Final = {
    "cuda": ("/dev/nvidiactl", "an NVIDIA driver"),
    "rocm": ("/dev/kfd", "an AMD driver"),
    "xpu": ("/sys/module/xe", "Intel's driver xe"),
    "tpu": ("/dev/accel0", "a TPU"),
    "directml": ("/dev/dxg", "DirectX of WSL"),
}
"""Device type -> device file that its driver creates, and the driver's name."""


ADVICE: Final = re.compile(r"[.;,]? [Tt]ry: ")
"""Separates what was found from what to do, in the reasons of probes."""


def package_checks() -> Iterator[Check]:
    """Check Python, packages, plugins, devices and the device "auto" selects."""
    yield python(sys.version_info[:3])
    yield Check("ok", "inl-core", f"{inl.__version__}, from: {installed_from()}")
    for package in PACKAGES:
        yield package_version(package, _version(package.name))
    yield from _plugins()
    yield from _devices()
    yield from unsupported_hardware(lambda path: Path(path).exists())
    yield from torch_build(lambda path: Path(path).exists())
    yield _auto()


def python(version: tuple[int, ...]) -> Check:
    """Check the version of Python."""
    text = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return Check("wrong", "Python", text, "install Python 3.11 or newer")
    return Check("ok", "Python", f"{text} ({platform.machine()})")


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def package_version(package: Package, version: str | None) -> Check:
    """Check the installed version of a package; ``None`` is not installed."""
    fix = install_command(package.requirement, options="-U")
    status: Status = "wrong" if package.required else "warn"
    if version is None:
        finding = f"not installed; used for {package.use}"
        return Check(status, package.name, finding, fix)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < package.oldest:
        oldest = ".".join(map(str, package.oldest))
        finding = f"{version}, required: {oldest} or newer"
        return Check(status, package.name, finding, fix)
    return Check("ok", package.name, version)


def _plugins() -> Iterator[Check]:
    for row in registry().plugins:
        subject, package = f"plugin {row.name}", row.distribution or row.source
        if row.status == "broken":
            fix = install_command(package, options="--force-reinstall")
            if row.distribution is None:
                fix = "check INL_PLUGINS, then: inl --debug plugins"
            yield Check("warn", subject, f"broken: {row.detail}", fix)
        elif row.status == "conflict":
            fix = f"{pip_command('uninstall')} {package}, or the other one"
            yield Check("warn", subject, f"conflict: {row.detail}", fix)
        elif row.status == "unsupported":
            fix = install_command(package, "inl-core", options="-U")
            yield Check("warn", subject, row.detail, fix)
        elif row.status == "ready":
            yield Check("ok", subject, row.detail)


def _devices() -> Iterator[Check]:
    for row in registry().devices():
        if row.info is not None:
            memory = show_bytes(row.info.memory_bytes)
            note, fix = split_advice(row.info.note)
            finding = ", ".join(filter(None, (row.info.name, memory, note)))
            subject = f"device {row.type}:{row.info.index}"
            yield Check("warn" if fix else "ok", subject, finding, fix)
        else:
            package = row.origin.distribution
            finding, fix = split_advice(row.reason or "unavailable")
            other = f"{pip_command('uninstall')} {package}"
            yield Check(
                "warn",
                f"device {row.type}",
                finding,
                fix
                or (f"fix the cause, or: {other}" if package else "check INL_PLUGINS"),
            )


def split_advice(text: str) -> tuple[str, str]:
    """Split the note or reason of a probe into the finding and what to do, or ""."""
    found = ADVICE.search(text)
    return (text[: found.start()], text[found.end() :]) if found else (text, "")


def unsupported_hardware(exists: Callable[[str], bool]) -> Iterator[Check]:
    """Report drivers without an installed backend; ``exists`` tests a device file."""
    known = registry()
    for kind, (path, driver) in HARDWARE.items():
        if kind not in known.types and exists(path):
            yield Check(
                "warn",
                f"device {kind}",
                f"{driver} is present ({path}), but no backend for {kind} is installed",
                known.advice(DeviceType(kind)).removeprefix("try: "),
            )


def torch_build(exists: Callable[[str], bool]) -> Iterator[Check]:
    """Report the build of torch: a CUDA build without a GPU wastes gigabytes."""
    version = _version("torch")
    if version is None:
        return
    drivers = [path for path, _ in HARDWARE.values()]
    size = installed_bytes("torch")
    libraries = [name for name in _requirements("torch") if name.startswith("nvidia-")]
    size += sum(map(installed_bytes, libraries))
    build = f"{version}, {show_bytes(size)}"
    if "+cpu" in version or not size or not any(map(_version, libraries)):
        yield Check("ok", "torch", build)
    elif any(map(exists, drivers)):
        yield Check("ok", "torch", f"{build}, with CUDA")
    else:
        yield Check(
            "warn",
            "torch",
            f"{build}: a CUDA build on a machine without a GPU",
            f"{pip_command('uninstall')} torch, then install the CPU build from "
            "PyTorch's index",
        )


def _requirements(name: str) -> list[str]:
    lines = distribution(name).requires or []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines]


def installed_bytes(name: str) -> int:
    """Return the size of a distribution's files; 0 if it is not installed."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return 0
    return sum(file.size or 0 for file in files)


def _auto() -> Check:
    try:
        device = choose_device("auto")
    except InlError as error:
        reason = registry().find(DeviceType.CPU).reason or ""
        fix = split_advice(reason)[1] or "inl devices says why each is unavailable"
        return Check("wrong", "device auto", str(error), fix)
    try:
        backend = make_backend(device)
    except InlError as error:
        return Check("wrong", "device auto", str(error), "inl --debug explain")
    dtypes = ", ".join(backend.traits.dtypes)
    return Check("ok", "device auto", f"{device}, computes in {dtypes}")
