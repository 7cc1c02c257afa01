"""Creates a new backend package from templates, for ``inl new-plugin``."""

from __future__ import annotations

from pathlib import Path
from string import Template

from inl.device import DeviceType
from inl.errors import DeviceError, RequestError
from inl.testing.scaffold_files import COMMON, EAGER, LICENSES, STYLES, traced

RESERVED = ("core", "cpu", "cuda", "directml", "inl", "intel", "jax", "reference",
         "rocm", "torch", "tpu", "worker", "xpu")  # fmt: skip
"""Reserved names: packages, device types and other values of ``--device``."""


def render(
    name: str,
    license: str = "Apache-2.0",  # noqa: A002
    style: str = "eager",
) -> dict[str, str]:
    """Return the files of package ``inl-NAME``: path in the package -> text.

    style: "eager" computes op by op in NumPy, "traced" compiles programs with
    ``jax.jit``. Raises :class:`~inl.errors.RequestError` for an invalid or reserved
    name, and for an unknown license or style.
    """
    check_name(name)
    if style not in STYLES:
        raise RequestError(f"style: found {style!r:.80}, accepted: {', '.join(STYLES)}")
    if license not in LICENSES:
        raise RequestError(
            f"license: found {license!r:.80}, accepted: {', '.join(LICENSES)}"
        )
    licensed = license != "none"
    line = f'license = "{license}"' if licensed else "# no license: all rights reserved"
    values = {
        "name": name,
        "distribution": distribution(name),
        "license": line,
        "dependencies": ", ".join(f'"{each}"' for each in ("inl-core", *STYLES[style])),
    }
    files = COMMON | (traced() if style == "traced" else EAGER)
    if licensed:
        files["LICENSE"] = LICENSES[license]
    return {
        Template(path).substitute(values): Template(text).substitute(values)
        for path, text in files.items()
    }


def create(
    name: str,
    parent: Path,
    license: str = "Apache-2.0",  # noqa: A002
    style: str = "eager",
) -> Path:
    """Write the package to a new folder in ``parent`` and return the folder.

    Creates ``parent`` if needed. Raises :class:`~inl.errors.RequestError` if the folder
    exists or cannot be created.
    """
    files = render(name, license, style)
    folder = parent / distribution(name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise RequestError(
            f"{folder}: already exists; choose another name or --path"
        ) from error
    except OSError as error:
        raise RequestError(f"{folder}: cannot be created: {error}") from error
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return folder


def distribution(name: str) -> str:
    """Return the package name for a device type."""
    return f"inl-{name.replace('_', '-')}"


def check_name(name: str) -> None:
    """Raise :class:`~inl.errors.RequestError` for an invalid or reserved name."""
    try:
        DeviceType(name)
        valid = not name.endswith("_") and "__" not in name
    except DeviceError:
        valid = False
    if not valid:
        raise RequestError(
            f"name: found {name!r:.80}, accepted: lower-case letters and digits, "
            "starting with a letter, single '_' between them, as in --device npu:0"
        )
    if name in RESERVED:
        raise RequestError(
            f"name: found {name!r}, which is reserved; reserved names: "
            f"{', '.join(RESERVED)}"
        )
