"""Entry points read from folders are those that the standard library finds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import entry_points

import pytest

from inl.plugin.discover import PREFIX, from_entry_points
from inl.plugin.distribution_folders import NotFolders, read_folders


def expected():
    """The plugins of ``sys.path`` by the standard library."""
    points = entry_points()
    groups = sorted(group for group in points.groups if group.startswith(PREFIX))
    return from_entry_points(
        [point for group in groups for point in points.select(group=group)]
    )


def found():
    return from_entry_points(read_folders(sys.path, PREFIX))


def test_everything_installed_here_is_found():
    assert found() == expected()


def test_lists_are_read_as_the_standard_library_reads_them(site):
    site.metadata(
        "npu",
        "# a comment\n[console_scripts]\nx = y:z\n\n[inl.v2]\n  npu = npu_entry\n"
        "other=npu_entry:plugin = odd\n[inl.v1]\nnpu = npu_next\n",
        "1.2+local",
    )
    site.metadata("tool", "[console_scripts]\ntool = tool:main\n")
    names = [(o.name, o.module, o.package) for o in found() if o.distribution == "npu"]
    assert names == [
        ("npu", "npu_entry", "npu 1.2+local"),
        ("other", "npu_entry:plugin = odd", "npu 1.2+local"),
    ]
    assert found() == expected()


def test_the_first_distribution_of_a_name_counts(site, tmp_path, monkeypatch):
    """Also where it is written in another way, or has no entry point."""
    site.metadata("two-names", "[inl.v2]\nold = old_entry\n")
    site.metadata("hidden", "[inl.v2]\nhidden = hidden_entry\n")
    later = type(site)(tmp_path / "earlier")
    later.path.mkdir()
    monkeypatch.syspath_prepend(later.path)
    later.metadata("Two.Names", "[inl.v2]\nnew = new_entry\n")
    later.metadata("hidden", "[console_scripts]\n")
    names = {origin.name for origin in found()}
    assert "new" in names
    assert names.isdisjoint(["old", "hidden"])
    assert found() == expected()


def test_an_egg_info_folder_is_a_distribution(site):
    info = site.path / "npu.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: npu\nVersion: 3\n")
    (info / "entry_points.txt").write_text("[inl.v2]\nnpu = npu_entry\n")
    assert "npu 3" in [origin.package for origin in found()]
    assert found() == expected()


@pytest.mark.parametrize(
    "text", ["[inl.v2]\nno equals sign\n", "x = y\n[inl.v2]\na = b\n"]
)
def test_a_damaged_list_is_left_to_the_standard_library(site, text):
    site.metadata("hurt", text)
    with pytest.raises(NotFolders):
        found()


def test_a_distribution_without_a_name_is_too(site):
    site.metadata("hurt", "[inl.v2]\na = b\n")
    (site.path / "hurt-1.0.dist-info" / "METADATA").write_text("Version: 1\n")
    with pytest.raises(NotFolders):
        found()


def test_other_places_are_too(site, monkeypatch):
    archive = site.path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("npu-1.0.dist-info/entry_points.txt", "[inl.v2]\nnpu = m\n")
    egg = site.path / "npu.egg"
    egg.mkdir()
    for place in (archive, egg):
        with pytest.raises(NotFolders):
            read_folders([str(place)], PREFIX)
    assert read_folders([str(site.path / "absent.zip")], PREFIX) == []

    class Finder:
        def find_distributions(self, _context):
            return []

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    with pytest.raises(NotFolders):
        found()


def test_discovery_does_not_import_the_standard_librarys_module():
    code = (
        "import sys; from inl.plugin.discover import installed; installed(); "
        "print('importlib.metadata' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
