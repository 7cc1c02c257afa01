"""Stored facts about plugins: private files, named by what they were found of."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inl import __version__
from inl.bounded_json import parse_json
from inl.cache_dir.location import cache_folder
from inl.plugin.discover import Origin

MAX_BYTES = 16_384
"""Size limit of a file; larger ones are ignored."""


def plugin_key(origin: Origin, *more: str) -> str:
    """Return a digest of the plugin, the files beside its module, INL, and ``more``."""
    about = origin.module, origin.group, origin.distribution, origin.version
    return _digest(origin.module.partition(":")[0], *more, *about)


def module_key(module: str) -> str:
    """Return a digest of a module, the files beside it, and INL."""
    return _digest(module)


def _digest(module: str, *about: Any) -> str:
    parts: list[Any] = [about, __version__, sys.version, sys.prefix, module]
    for file in _files(module):
        status = file.stat()
        parts.append(
            (str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _files(module: str) -> list[Path]:
    """Return the Python files of the folder of a module; imports nothing."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None:
        return []
    folders = [Path(part) for part in spec.submodule_search_locations or ()]
    if not folders:
        return (
            [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []
        )
    for folder in folders:
        place = folder.joinpath(*rest)
        place = place if place.is_dir() else place.parent
        if place.is_dir():
            return sorted({*folder.glob("*.py"), *place.glob("*.py")})
    return []


def read_facts(key: str, types: Mapping[str, type]) -> dict[str, Any] | None:
    """Return stored facts; ``None`` if there are none that only this user wrote.

    types: name of each fact -> its type; facts of other names or types are ignored.
    """
    path = _path(key)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | _NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not _is_private(status) or not _is_private(
                path.parent.stat(), folder=True
            ):
                return None
            facts: Any = parse_json(file.read(MAX_BYTES), str(path))
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict) or facts.pop("key", None) != key:
        return None
    found = {name: type(value) for name, value in facts.items()}
    return facts if found == types else None


def write_facts(key: str, facts: Mapping[str, Any]) -> None:
    """Store facts as JSON in a private folder; raises OSError."""
    import tempfile  # takes milliseconds, and is rarely needed

    path = _path(key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(path.parent.stat(), folder=True):
        return
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({**facts, "key": key}, file)
    Path(name).replace(path)


def _path(key: str) -> Path:
    return cache_folder() / "plugins" / f"{key[:32]}.json"


_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
"""So that a FIFO in place of a file does not block."""


def _is_private(status: os.stat_result, *, folder: bool = False) -> bool:
    """Whether only this user can write; True where the system has no owners."""
    kind = stat.S_ISDIR if folder else stat.S_ISREG
    if not kind(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
