"""Where plugins are named: installed entry points, and the variable INL_PLUGINS."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inl.plugin.hooks import GROUP

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

PREFIX = "inl.v"
VARIABLE = "INL_PLUGINS"
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")
OWN_MODULE = re.compile(r"inl_(\w+?)(\.plugin)?")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin is named; nothing of it is imported yet."""

    name: str
    module: str
    """``package.module``, or ``package.module:object``."""
    source: str
    """"builtin", "INL_PLUGINS" or "entry point"."""
    distribution: str | None = None
    version: str | None = None
    group: str = GROUP
    problem: str | None = None
    """Why it cannot even be tried."""

    @property
    def package(self) -> str:
        """Distribution and version, or what stands for them."""
        if self.distribution is None or self.source == "builtin":
            return self.source
        return f"{self.distribution} {self.version or '(no version)'}"

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.package})"


def from_modules(names: Iterable[str]) -> list[Origin]:
    """Plugins given by module name, in the order given."""
    found: dict[str, Origin] = {}
    for name in filter(None, map(str.strip, names)):
        own = OWN_MODULE.fullmatch(name)
        problem = None
        if not MODULE.fullmatch(name):
            problem = (
                f"{VARIABLE}: found {name!r:.80}, accepted: module names such as "
                "inl_cpu.plugin, separated by commas"
            )
        found[name] = Origin(own[1] if own else name, name, VARIABLE, problem=problem)
    return list(found.values())


def variable() -> list[str]:
    """Module names in INL_PLUGINS."""
    return os.environ.get(VARIABLE, "").split(",")


def from_entry_points(points: Iterable[EntryPoint]) -> list[Origin]:
    """Plugins of every major version, by name and distribution."""
    found = {origin: None for point in points for origin in _origins(point)}
    served = {(o.name, o.distribution) for o in found if o.group == GROUP}
    kept = [
        origin
        for origin in found
        if origin.group == GROUP or (origin.name, origin.distribution) not in served
    ]
    return sorted(kept, key=_order)


def _order(origin: Origin) -> tuple[str, ...]:
    return origin.name, origin.distribution or "", origin.group, origin.module


def _origins(point: EntryPoint) -> Iterator[Origin]:
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


def installed() -> tuple[list[EntryPoint], list[Origin]]:
    """Entry points of this environment, and distributions whose list is damaged.

    The standard library stops at the first damaged list; then each is read alone.
    """
    from importlib.metadata import entry_points

    try:
        found = entry_points()
    except Exception:
        return _one_by_one()
    groups = sorted(group for group in found.groups if group.startswith(PREFIX))
    return [point for group in groups for point in found.select(group=group)], []


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
