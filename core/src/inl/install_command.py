"""The pip command that installs packages of INL from where this INL came from."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

FOLDERS: Final = {
    "inl-core": "core",
    "inl-toolkit": "libs/inl-toolkit",
    "inl-torch": "libs/inl-torch",
    "inl-jax": "libs/inl-jax",
    "inl-onnx": "libs/inl-onnx",
    "inl-cpu": "plugins/inl-cpu",
    "inl-cuda": "plugins/inl-cuda",
    "inl-mooncake": "plugins/inl-mooncake",
    "inl-nixl": "plugins/inl-nixl",
    "inl-ray": "plugins/inl-ray",
    "inl-rocm": "plugins/inl-rocm",
    "inl-intel": "plugins/inl-intel",
    "inl-directml": "plugins/inl-directml",
    "inl-tpu": "plugins/inl-tpu",
}
"""Distributions of this repository and their folders in it."""

LIBRARIES: Final = {
    "inl-cpu[torch]": ("inl-torch",),
    "inl-cuda": ("inl-torch",),
    "inl-rocm": ("inl-torch",),
    "inl-intel": ("inl-torch",),
    "inl-directml": ("inl-onnx",),
    "inl-directml[torch]": ("inl-torch",),
    "inl-tpu": ("inl-jax",),
}
"""Distributions of :data:`FOLDERS` that one needs, or one of its extras, beside the
core."""

RECORD: Final = Path(__file__).with_name("wheel_folder.txt")
"""In wheels of ``make wheels``: the folder of these wheels. ``--find-links`` leaves no
trace in an installation."""


class Source(NamedTuple):
    """Where this INL was installed from."""

    kind: Literal["checkout", "folder", "git", "index"]
    place: str = ""
    """Path of the checkout, or of the folder of wheels; URL and commit for git."""
    editable: bool = False

    def __str__(self) -> str:
        if self.kind == "index":
            return "an index, or a folder that pip was told by --find-links: repeat it"
        return f"{self.kind} {self.place}"


def install_command(*requirements: str, options: str = "", python: str = "") -> str:
    """Return the command that installs ``requirements`` into this Python.

    Those of INL are taken from the source of this INL, with the libraries that they
    need; others are passed on. options: of ``pip install``, such as "-U". python: path
    of another interpreter to install into.
    """
    known = any(each.partition("[")[0] in FOLDERS for each in requirements)
    source = installed_from() if known else Source("index")
    pip = f"{_quoted(python)} -m pip install" if python else pip_command("install")
    words = [pip, *filter(None, [options])]
    if source.kind == "folder":
        words += ["--find-links", _quoted(_shown(source.place))]
    for requirement in _with_libraries(requirements, source):
        words.append(_located(requirement, source))
    return " ".join(words)


@cache
def installed_from() -> Source:
    """Return where this INL was installed from."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

    checkout = Path(__file__).parents[3]
    if _is_checkout(checkout):
        return Source("checkout", str(checkout), editable=True)
    try:
        text = distribution("inl-core").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    source = Source("index")
    if text:
        with suppress(ValueError):  # damaged
            source = source_of(json.loads(text))
    if source.kind == "index" and RECORD.exists():
        folder = Path(RECORD.read_text("utf-8").strip())
        return Source("folder", str(folder)) if folder.is_dir() else source
    return source


def source_of(url: dict[str, Any]) -> Source:
    """Return the source in a ``direct_url.json`` of inl-core; one that is gone is an
    index.
    """
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    address = url["url"]
    if git := url.get("vcs_info"):
        return Source("git", f"{git['vcs']}+{address}@{git['commit_id']}")
    parts = urlsplit(address)
    if parts.scheme != "file":
        return Source("index")
    path = Path(url2pathname(parts.path))
    if "dir_info" not in url:
        folder = path.parent
        return Source("folder", str(folder)) if folder.is_dir() else Source("index")
    if _is_checkout(path.parent):
        editable = bool(url["dir_info"].get("editable"))
        return Source("checkout", str(path.parent), editable)
    return Source("index")


def _is_checkout(folder: Path) -> bool:
    return all((folder / part / "pyproject.toml").exists() for part in FOLDERS.values())


def _with_libraries(requirements: tuple[str, ...], source: Source) -> list[str]:
    """Insert libraries before what needs them, where pip cannot find them by name."""
    if source.kind in ("folder", "index"):
        return list(requirements)
    libraries = [
        library
        for each in requirements
        for key in dict.fromkeys((each.partition("[")[0], each))
        for library in LIBRARIES.get(key, ())
    ]
    return list(dict.fromkeys((*libraries, *requirements)))


def _located(requirement: str, source: Source) -> str:
    name, bracket, extras = requirement.partition("[")
    folder = FOLDERS.get(name)
    if folder is None or source.kind in ("folder", "index"):
        return _quoted(requirement)
    if source.kind == "git":
        extra = bracket + extras
        return _quoted(f"{name}{extra} @ {source.place}#subdirectory={folder}")
    path = _quoted(_shown(source.place, *folder.split("/")) + bracket + extras)
    return f"-e {path}" if source.editable else path


def _shown(*parts: str) -> str:
    """Return a path, from the working folder if it is inside.

    It has a separator: pip takes a bare word for a name.
    """
    path = Path(*parts)
    try:
        return os.path.join(".", path.relative_to(Path.cwd()))  # noqa: PTH118
    except (OSError, ValueError):
        return str(path)


def pip_command(verb: str) -> str:
    """Return ``pip VERB``, or what does it for this Python if that pip is another's."""
    python = Path(sys.executable)
    # setuptools' own finder would take an import of pip for pip itself, and no longer
    # provide distutils, which torch's compiler needs.
    if PathFinder.find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip {verb} --python {_quoted(_shown(str(python)))}"
    found = shutil.which("pip")
    if found and Path(found).parent == python.parent:
        return f"pip {verb}"
    return f"{_quoted(_shown(str(python)))} -m pip {verb}"


def _quoted(word: str) -> str:
    if os.name == "nt":
        return f'"{word}"' if any(mark in word for mark in " <>&|^;") else word
    return shlex.quote(word)
