"""A new backend package, rendered from one set of templates."""

from __future__ import annotations

from pathlib import Path
from string import Template

from inl.device import DeviceType
from inl.errors import DeviceError, RequestError
from inl.testing.scaffold_files import FILES, LICENSES

TAKEN = ("core", "cpu", "cuda", "directml", "inl", "intel", "jax", "reference",
         "rocm", "torch", "tpu", "worker", "xpu")  # fmt: skip
"""Names that have a meaning already: packages, device types, parts of ``--device``."""


def render(name: str, license: str = "Apache-2.0") -> dict[str, str]:  # noqa: A002
    """Text of every file of package ``inl-NAME``, by its path in the package.

    Raises :class:`~inl.errors.RequestError` for a name that is no device type or is
    one of ours, and for an unknown license.
    """
    check_name(name)
    if license not in LICENSES:
        raise RequestError(
            f"license: found {license!r:.80}, accepted: {', '.join(LICENSES)}"
        )
    known = license != "none"
    line = f'license = "{license}"' if known else "# no license: all rights kept"
    words = {
        "name": name,
        "distribution": distribution(name),
        "license": line,
    }
    files = dict(FILES)
    if known:
        files["LICENSE"] = LICENSES[license]
    return {
        Template(path).substitute(words): Template(text).substitute(words)
        for path, text in files.items()
    }


def create(name: str, parent: Path, license: str = "Apache-2.0") -> Path:  # noqa: A002
    """Write the package into a new folder of ``parent``, which is made too.

    Raises :class:`~inl.errors.RequestError` where that folder exists or cannot be made.
    """
    files = render(name, license)
    folder = parent / distribution(name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise RequestError(
            f"{folder}: exists already; choose another name or --path"
        ) from error
    except OSError as error:
        raise RequestError(f"{folder}: cannot be made: {error}") from error
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return folder


def distribution(name: str) -> str:
    """Name of the package that serves a device type."""
    return f"inl-{name.replace('_', '-')}"


def check_name(name: str) -> None:
    """Raise :class:`~inl.errors.RequestError` for a name that a plugin cannot have."""
    try:
        DeviceType(name)
        sound = not name.endswith("_") and "__" not in name
    except DeviceError:
        sound = False
    if not sound:
        raise RequestError(
            f"name: found {name!r:.80}, accepted: lower-case letters and digits, with "
            "single '_' between them, beginning with a letter, such as npu; users will "
            "write it in --device npu:0"
        )
    if name in TAKEN:
        raise RequestError(
            f"name: found {name!r}, which INL itself uses; choose another than "
            f"{', '.join(TAKEN)}"
        )
