"""The pip commands of errors and of `inl doctor`, for each source of INL."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from inl import install_command as module
from inl.install_command import (
    FOLDERS,
    LIBRARIES,
    Source,
    install_command,
    installed_from,
    pip_command,
    source_of,
)

ROOT = Path(__file__).parents[2]
GIT = Source("git", "git+https://example.org/inl@abc")


@pytest.fixture
def come_from(monkeypatch):
    """Function that replaces the source of this INL."""
    monkeypatch.setattr(module, "pip_command", lambda verb: f"pip {verb}")

    def replace(*source, **settings):
        found = Source(*source, **settings)
        monkeypatch.setattr(module, "installed_from", lambda: found)

    return replace


@pytest.fixture
def checkout(tmp_path):
    """Folder that looks like a checkout."""
    for folder in FOLDERS.values():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").touch()
    return tmp_path


def test_the_table_has_every_distribution_and_its_libraries():
    found, needs = {}, {}
    for path in sorted(ROOT.glob("[clp]*/**/pyproject.toml")):
        if {"build", "scaffold_data"} & set(path.parts):
            continue
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        name = project["name"]
        found[name] = path.parent.relative_to(ROOT).as_posix()
        extras = project.get("optional-dependencies", {})
        lists = {name: project["dependencies"]}
        lists |= {f"{name}[{extra}]": lines for extra, lines in extras.items()}
        for key, lines in lists.items():
            names = (re.split(r"[^\w-]", line, maxsplit=1)[0] for line in lines)
            known = (each for each in names if each in FOLDERS)
            if libraries := [each for each in known if each not in ("inl-core", name)]:
                needs[key] = tuple(libraries)
    assert found == FOLDERS
    assert needs == LIBRARIES


def test_an_index_has_packages_by_name(come_from):
    come_from("index")
    assert install_command("inl-cuda") == "pip install inl-cuda"
    line = install_command("inl-core[text]", options="-U")
    assert line == "pip install -U 'inl-core[text]'"


def test_a_folder_of_wheels_is_searched(come_from, tmp_path, monkeypatch):
    come_from("folder", str(tmp_path / "my wheels"))
    line = f"pip install --find-links '{tmp_path}/my wheels' inl-cuda"
    assert install_command("inl-cuda") == line
    monkeypatch.chdir(tmp_path)
    line = "pip install --find-links './my wheels' 'inl-core[cli]'"
    assert install_command("inl-core[cli]") == line


def test_a_checkout_brings_the_libraries(come_from, tmp_path, monkeypatch):
    come_from("checkout", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert install_command("inl-cuda") == (
        "pip install ./libs/inl-torch ./plugins/inl-cuda"
    )
    assert install_command("inl-directml[torch]") == (
        "pip install ./libs/inl-onnx ./libs/inl-torch './plugins/inl-directml[torch]'"
    )
    assert install_command("inl-core[hub]") == "pip install './core[hub]'"
    monkeypatch.chdir(ROOT)
    assert install_command("inl-cpu") == f"pip install {tmp_path}/plugins/inl-cpu"


def test_an_editable_checkout_stays_editable(come_from):
    come_from("checkout", "/away", editable=True)
    assert install_command("inl-tpu[tpu]") == (
        "pip install -e /away/libs/inl-jax -e '/away/plugins/inl-tpu[tpu]'"
    )


def test_a_repository_is_named_with_its_commit(come_from):
    come_from(*GIT)
    where = "git+https://example.org/inl@abc#subdirectory"
    assert install_command("inl-cuda") == (
        f"pip install 'inl-torch @ {where}=libs/inl-torch' "
        f"'inl-cuda @ {where}=plugins/inl-cuda'"
    )


def test_other_packages_are_passed_on(come_from):
    come_from("checkout", "/away")
    assert install_command("jax>=0.10,<0.11") == "pip install 'jax>=0.10,<0.11'"
    assert install_command("inl-npu") == "pip install inl-npu"


def url(path, **more):
    return {"url": path.as_uri(), **more}


def test_direct_url_of_each_kind(checkout, tmp_path):
    core, wheel = checkout / "core", tmp_path / "inl_core-0.1.0-py3-none-any.whl"
    editable = url(core, dir_info={"editable": True})
    assert source_of(editable) == Source("checkout", str(checkout), editable=True)
    assert source_of(url(core, dir_info={})) == Source("checkout", str(checkout))
    assert source_of(url(wheel, archive_info={})) == Source("folder", str(tmp_path))
    git = {"vcs": "git", "commit_id": "abc"}
    address = "https://example.org/inl"
    assert source_of({"url": address, "vcs_info": git, "subdirectory": "core"}) == GIT


def test_a_source_that_is_gone_is_not_named(tmp_path):
    gone = tmp_path / "gone"
    for found in (
        url(gone / "core", dir_info={"editable": True}),
        url(gone / "inl_core-0.1.0-py3-none-any.whl", archive_info={}),
        {"url": "https://example.org/inl_core-0.1.0.whl", "archive_info": {}},
    ):
        assert source_of(found) == Source("index")


class FakeDistribution:
    """Fake of an installed inl-core."""

    def __init__(self, text):
        self.text = text

    def read_text(self, name):
        return self.text if name == "direct_url.json" else None


@pytest.mark.parametrize("direct", [True, False])
def test_an_installation_knows_its_source(checkout, tmp_path, monkeypatch, direct):
    """Beside site-packages there is no checkout."""
    place = tmp_path / "lib" / "python" / "site-packages" / "inl" / "one.py"
    monkeypatch.setattr(module, "__file__", str(place))
    core = url(checkout / "core", dir_info={})
    fake = FakeDistribution(json.dumps(core) if direct else None)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: fake)
    record = tmp_path / "wheel_folder.txt"
    monkeypatch.setattr(module, "RECORD", record)
    found = installed_from.__wrapped__
    assert found() == (Source("checkout", str(checkout)) if direct else Source("index"))
    record.write_text(f"{tmp_path}\n", "utf-8")
    if not direct:
        assert found() == Source("folder", str(tmp_path))
        record.write_text(f"{tmp_path}/gone\n", "utf-8")
        assert found() == Source("index")


def test_the_text_of_a_source():
    assert str(Source("checkout", "/src/inl", editable=True)) == "checkout /src/inl"
    assert str(Source("folder", "/wheels")) == "folder /wheels"
    assert "--find-links" in str(Source("index"))


def test_this_checkout_is_found():
    assert installed_from() == Source("checkout", str(ROOT), editable=True)


def test_pip_is_that_of_this_python(tmp_path, monkeypatch):
    other = tmp_path / "pip"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/opt/inl/bin/python")
    assert pip_command("install") == "/opt/inl/bin/python -m pip install"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert pip_command("uninstall") == "pip uninstall"


def test_a_python_without_pip_uses_uv(tmp_path, monkeypatch):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setattr(module.PathFinder, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "executable", "/opt/inl/bin/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pip_command("install") == "uv pip install --python /opt/inl/bin/python"
    monkeypatch.setenv("PATH", os.devnull)
    assert pip_command("install") == "/opt/inl/bin/python -m pip install"


def test_looking_for_pip_leaves_distutils_to_setuptools():
    """Setuptools' finder gives distutils away when it is asked for pip."""
    hack = pytest.importorskip("_distutils_hack")
    before = vars(hack.DISTUTILS_FINDER).copy()
    assert "install" in module.pip_command("install")
    assert vars(hack.DISTUTILS_FINDER) == before
