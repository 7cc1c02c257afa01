"""Entry points of installed distributions, read without ``importlib.metadata``.

Importing that module takes 0.015 s, a twentieth of the start of a small model. What pip
installs are folders with text, which are read here; archives, eggs, other finders and
damaged lists are left to the module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

SUFFIXES = ".dist-info", ".egg-info"
SEPARATORS = re.compile(r"[-_.]+")


class Distribution(NamedTuple):
    """An installed distribution, with the attribute of that of the standard library."""

    metadata: dict[str, str]
    """"Name" and "Version"."""


class Point(NamedTuple):
    """An entry point, with the attributes of that of the standard library."""

    name: str
    value: str
    group: str
    dist: Distribution


class NotFolders(Exception):
    """Something else may hold distributions, or a list is damaged."""


def read_folders(folders: Iterable[str], prefix: str) -> list[Point]:
    """Return the entry points of groups that begin with ``prefix``, sorted by group.

    Of distributions with the same name the first one counts, as on ``sys.path``. Raises
    :class:`NotFolders`.
    """
    if any(_finds_distributions(finder) for finder in sys.meta_path):
        raise NotFolders
    points: list[Point] = []
    seen: set[str] = set()
    for folder in folders:
        for info in _infos(folder):
            name = SEPARATORS.sub("_", info.stem.partition("-")[0]).lower()
            if name not in seen:
                seen.add(name)
                points += _points(info, prefix)
    return sorted(points, key=lambda point: point.group)


def _finds_distributions(finder: Any) -> bool:
    """Whether a finder has distributions beyond those of folders."""
    return finder is not PathFinder and hasattr(finder, "find_distributions")


def _infos(folder: str) -> Iterator[Path]:
    if folder.lower().endswith(".egg"):
        raise NotFolders
    try:
        children = list(Path(folder).iterdir())
    except FileNotFoundError:
        return
    except OSError:
        raise NotFolders from None  # such as an archive
    yield from (each for each in children if each.name.lower().endswith(SUFFIXES))


def _points(info: Path, prefix: str) -> list[Point]:
    """Read the groups of a distribution whose names begin with ``prefix``."""
    try:
        text = (info / "entry_points.txt").read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError):
        raise NotFolders from None
    if f"[{prefix}" not in text:
        return []
    distribution = Distribution(_headers(info))
    return [
        Point(name, value, group, distribution)
        for group, name, value in _lines(text)
        if group.startswith(prefix)
    ]


def _lines(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield group, name and value of each line of a list."""
    group = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]")
            continue
        name, equals, value = map(str.strip, line.partition("="))
        if not equals or not group:
            raise NotFolders
        yield group, name, value


def _headers(info: Path) -> dict[str, str]:
    """Read name and version of a distribution."""
    file = "METADATA" if info.suffix.lower() == ".dist-info" else "PKG-INFO"
    try:
        text = (info / file).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise NotFolders from None
    found: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key in ("Name", "Version"):
            found.setdefault(key, value.strip())
    if "Name" not in found:
        raise NotFolders
    return found
