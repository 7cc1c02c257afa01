"""One line per device type on a machine with no plugin, or with damaged ones."""

from __future__ import annotations

from inl.cli.devices import device_rows
from inl.plugin.loader import load_registry
from inl.plugin.rows import PACKAGES, install_line

BROKEN = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    raise OSError("libamdhip64.so: wrong version")
"""


def test_each_type_without_a_plugin_names_its_package():
    rows = device_rows(load_registry((), ()))
    absent = [row for row in rows if row["status"] == "not installed"]
    assert {row["device"]: row["reason"] for row in absent} == {
        kind: f"try: {install_line(kind)}" for kind in PACKAGES
    }
    assert all(name in install_line(kind) for kind, name in PACKAGES.items())
    assert [row["device"] for row in rows if row not in absent] == ["reference:0"]


def test_a_broken_plugin_is_one_row(tmp_path, monkeypatch):
    (tmp_path / "rocm.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    rows = device_rows(load_registry((), ("rocm",)))
    (row,) = [row for row in rows if row["device"] == "rocm"]
    assert row["status"] == "broken"
    assert "libamdhip64.so: wrong version" in row["reason"]
