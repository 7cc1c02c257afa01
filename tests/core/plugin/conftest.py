from __future__ import annotations

import sys
from importlib.metadata import distributions

import pytest

from inl.plugin import GROUP, load_registry

HEADER = "from inl.plugin import hookimpl\n"

GOOD = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    register("good", "good_backend:make")
"""


class Site:
    """A folder on sys.path for installing fake distributions."""

    def __init__(self, path):
        self.path = path

    def module(self, name, source):
        (self.path / f"{name}.py").write_text(source)

    def add(self, dist, source, *, entry=None, group=GROUP, version="1.0"):
        """Install ``dist``; its entry point ``entry`` names a module of ``source``."""
        module = f"{dist.replace('-', '_')}_entry"
        self.module(module, source)
        self.metadata(dist, f"[{group}]\n{entry or dist} = {module}\n", version)
        return module

    def metadata(self, dist, entry_points, version="1.0"):
        info = self.path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(entry_points)

    def load(self, *modules):
        """Load the plugins of this folder only."""
        found = distributions(path=[str(self.path)])
        points = [point for dist in found for point in dist.entry_points]
        return load_registry(points, modules)


@pytest.fixture
def site(tmp_path, monkeypatch):
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    before = set(sys.modules)
    yield Site(path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) == str(path / f"{name}.py"):
            del sys.modules[name]


@pytest.fixture
def row_of():
    def find(known, name):
        (row,) = [row for row in known.plugins if row.name == name]
        return row

    return find


@pytest.fixture
def good(site):
    """A valid plugin that must stay ready beside a faulty one."""
    site.add("good", GOOD)
    return site
