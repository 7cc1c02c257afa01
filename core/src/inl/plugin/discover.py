"""Plugin discovery: installed entry points and the variable INL_PLUGINS."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.plugin.contract_v1 import GROUP_OF_V1
from inl.plugin.distribution_folders import NotFolders, Point, read_folders
from inl.plugin.hooks import GROUP

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

    AnyPoint = EntryPoint | Point

SERVED_GROUPS = GROUP, GROUP_OF_V1
"""Entry-point groups that this core serves, the preferred one first."""
PREFIX = "inl.v"
"""Prefix of the entry-point groups; the major version follows."""
VARIABLE = "INL_PLUGINS"
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")
OWN_MODULE = re.compile(r"inl_(\w+?)(\.plugin)?")
"""Module names that are shortened to their device type."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Name and source of a plugin that is not imported yet."""

    name: str
    module: str
    """``package.module``, or ``package.module:object``."""
    source: str
    """"builtin", "INL_PLUGINS" or "entry point"."""
    distribution: str | None = None
    version: str | None = None
    group: str = ""
    """That of the entry point; empty for a module that is loaded by name."""
    problem: str | None = None
    """Reason why loading is not attempted."""

    @property
    def package(self) -> str:
        """Distribution and version; the source if there is no distribution."""
        if self.distribution is None or self.source == "builtin":
            return self.source
        return f"{self.distribution} {self.version or '(no version)'}"

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.package})"


def from_modules(names: Iterable[str]) -> list[Origin]:
    """Return the plugins of module names, in order and without duplicates."""
    origins: dict[str, Origin] = {}
    for name in filter(None, map(str.strip, names)):
        own = OWN_MODULE.fullmatch(name)
        problem = None
        if not MODULE.fullmatch(name):
            problem = (
                f"{VARIABLE}: found {name!r:.80}, accepted: module names such as "
                "inl_cpu.plugin, separated by commas"
            )
        origins[name] = Origin(own[1] if own else name, name, VARIABLE, problem=problem)
    return list(origins.values())


def variable() -> list[str]:
    """Return the module names in INL_PLUGINS."""
    return os.environ.get(VARIABLE, "").split(",")


def from_entry_points(points: Iterable[AnyPoint]) -> list[Origin]:
    """Return the plugins of entry points, sorted by name and distribution.

    A plugin with entry points for several major versions is the one of the newest that
    this core serves.
    """
    origins = {origin: None for point in points for origin in _origins(point)}
    for group in SERVED_GROUPS:
        served = {(o.name, o.distribution) for o in origins if o.group == group}
        origins = {
            origin: None
            for origin in origins
            if origin.group == group or (origin.name, origin.distribution) not in served
        }
    return sorted(origins, key=_sort_key)


def _sort_key(origin: Origin) -> tuple[str, ...]:
    return origin.name, origin.distribution or "", origin.group, origin.module


def _origins(point: AnyPoint) -> Iterator[Origin]:
    if point.group.startswith(PREFIX):
        problem = None
        if not MODULE.fullmatch(point.value):
            problem = (
                f"entry point {point.name!r}: found {point.value!r:.80}, accepted: "
                "a module such as inl_cpu.plugin"
            )
        yield Origin(
            point.name,
            point.value,
            "entry point",
            _metadata(point.dist, "Name"),
            _metadata(point.dist, "Version"),
            point.group,
            problem,
        )


def installed() -> tuple[list[AnyPoint], list[Origin]]:
    """Return the installed entry points, and origins of damaged entry-point lists.

    Distributions are read again once a folder of ``sys.path`` has changed.
    """
    points, damaged = _installed(tuple(map(_folder, sys.path)))
    return list(points), list(damaged)


def _folder(name: str) -> tuple[str, int]:
    """Return the absolute path and the time of the last change, 0 without a folder."""
    path = Path(name).absolute()
    try:
        return str(path), path.stat().st_mtime_ns
    except OSError:
        return str(path), 0


@lru_cache(maxsize=1)
def _installed(
    folders: tuple[tuple[str, int], ...],
) -> tuple[Sequence[AnyPoint], list[Origin]]:
    """Read every distribution: with hundreds of them, a tenth of a second.

    With ``importlib.metadata`` where it is imported anyway, or is needed. It fails at
    the first damaged list; the distributions are then read one by one.
    """
    if "importlib.metadata" not in sys.modules:
        with suppress(NotFolders):
            return read_folders([folder for folder, _ in folders], PREFIX), []
    from importlib.metadata import entry_points

    try:
        points = entry_points()
    except Exception:
        return _one_by_one()
    groups = sorted(group for group in points.groups if group.startswith(PREFIX))
    return [point for group in groups for point in points.select(group=group)], []


def _one_by_one() -> tuple[list[EntryPoint], list[Origin]]:
    from importlib.metadata import distributions

    points: list[EntryPoint] = []
    damaged: list[Origin] = []
    seen: set[str] = set()
    for dist in distributions():
        name = _metadata(dist, "Name") or "unknown"
        if name in seen:
            continue
        seen.add(name)
        try:
            points += dist.entry_points
        except Exception as error:
            damaged += _damaged(dist, name, error)
    return points, damaged


def _damaged(dist: Distribution, name: str, error: Exception) -> Iterator[Origin]:
    text = dist.read_text("entry_points.txt") or ""
    if f"[{PREFIX}" in text:
        yield Origin(
            name.removeprefix("inl-"),
            "",
            "entry point",
            name,
            _metadata(dist, "Version"),
            problem=f"entry_points.txt is damaged: {type(error).__name__}: {error}",
        )


def _metadata(dist: Any, field: str) -> str | None:
    try:
        value = dist.metadata[field]
    except Exception:
        return None
    return None if value is None else str(value)
