from __future__ import annotations

import re
import sys
from importlib import metadata

import pytest

from inl import __version__
from inl.plugin import load_registry
from inl.plugin.discover import from_modules, installed

SOUND = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    register("npu", "m:C")
"""


def test_the_core_is_a_plugin(site, row_of):
    row = row_of(site.load(), "reference")
    assert (row.status, row.source) == ("ready", "builtin")
    assert row.package == f"inl-core {__version__} (builtin)"
    assert re.fullmatch(
        r"1 device; \d+ model names; places join, worker; \d+ commands", row.detail
    )


def test_a_module_of_the_variable_shows_its_source(site, row_of):
    site.module("npu_by_name", SOUND)
    row = row_of(site.load("npu_by_name"), "npu_by_name")
    assert (row.status, row.source, row.package) == (
        "ready",
        "INL_PLUGINS",
        "INL_PLUGINS",
    )


def test_a_module_named_both_ways_is_one_row(site):
    module = site.add("npu", SOUND)
    rows = site.load(module, module).plugins
    assert [(row.name, row.source) for row in rows[1:]] == [("npu", "entry point")]


def test_a_module_of_an_unsupported_entry_point_may_be_named(site):
    module = site.add("npu", SOUND, group="inl.v3")
    rows = site.load(module).plugins[1:]
    assert [row.status for row in rows] == ["unsupported", "ready"]


def test_an_entry_point_may_name_an_object(site, row_of):
    site.module(
        "holder",
        "from inl.plugin import hookimpl\n"
        "class Holder:\n"
        "    @hookimpl\n"
        "    def inl_register_backends(self, register): register('npu', 'm:C')\n"
        "plugin = Holder()\n",
    )
    site.metadata("npu", "[inl.v2]\nnpu = holder:plugin\n")
    assert row_of(site.load(), "npu").status == "ready"


def test_the_variable_is_read(site, monkeypatch, row_of):
    site.module("npu_by_variable", SOUND)
    monkeypatch.setenv("INL_PLUGINS", " npu_by_variable, ,gone.module")
    known = load_registry(entry_points=())
    assert row_of(known, "npu_by_variable").status == "ready"
    gone = row_of(known, "gone.module")
    assert gone.detail == "ModuleNotFoundError: No module named 'gone'"


@pytest.mark.parametrize("name", ["a b", "1x", "x.", "x:", "../x", "x-y"])
def test_an_invalid_module_name_is_broken(site, row_of, name):
    row = row_of(site.load(name), name)
    assert row.status == "broken"
    assert row.detail.startswith(f"INL_PLUGINS: found {name!r}, accepted: module")


def test_inl_modules_are_named_by_device_type():
    names = ["inl_cpu.plugin", "inl_toy", "acme.plugin"]
    assert [origin.name for origin in from_modules(names)] == [
        "cpu",
        "toy",
        "acme.plugin",
    ]


def test_installed_distributions_are_found(site, row_of):
    site.add("npu", SOUND, version="2.1")
    row = row_of(load_registry(modules=()), "npu")
    assert (row.package, row.status) == ("npu 2.1", "ready")


def test_distributions_are_read_again_after_an_installation(site, monkeypatch):
    """Once for each state of the folders: every start asks several times."""
    read, before = [], metadata.entry_points

    def counted():
        read.append(1)
        return before()

    monkeypatch.setattr(metadata, "entry_points", counted)
    site.add("first", SOUND)
    names = {point.name for point in installed()[0]}
    assert "first" in names
    assert "second" not in names
    installed()
    assert len(read) == 1
    site.add("second", SOUND)
    assert {point.name for point in installed()[0]} >= {"first", "second"}
    assert len(read) == 2


def test_one_damaged_list_does_not_hide_the_others(site, row_of):
    site.add("npu", SOUND)
    site.metadata("inl-hurt", "[inl.v2]\nthis line has no equals sign\n")
    with pytest.raises(TypeError):
        metadata.entry_points()  # fails as a whole, so lists are read one by one
    known = load_registry(modules=())
    assert row_of(known, "npu").status == "ready"
    hurt = row_of(known, "hurt")
    assert (hurt.distribution, hurt.status) == ("inl-hurt", "broken")
    assert hurt.detail.startswith("entry_points.txt is damaged: ")


def test_damaged_lists_of_other_packages_are_ignored(site):
    site.metadata("stranger", "[other]\nthis line has no equals sign\n")
    assert "stranger" not in [row.name for row in load_registry(modules=()).plugins]


def test_a_bad_entry_point_value_is_broken(site, row_of):
    site.metadata("npu", "[inl.v2]\nnpu = not a module\n")
    row = row_of(site.load(), "npu")
    assert row.detail.startswith("entry point 'npu': found 'not a module', accepted:")


def test_loading_imports_no_backend(site):
    site.module("heavy_backend", "C = 1")
    site.add("npu", SOUND.replace("m:C", "heavy_backend:C"))
    assert site.load().backend("npu").backend == "heavy_backend:C"
    assert "heavy_backend" not in sys.modules
