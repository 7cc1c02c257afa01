"""``inl new-plugin``; the toy example is its output for "toy"."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inl.errors import RequestError
from inl.plugin import GROUP
from inl.testing.scaffold import RESERVED, create, render

ROOT = Path(__file__).parents[3]
TOY = ROOT / "examples" / "inl-toy"


def tree(folder):
    """Return path -> text of the source files, without build and cache files."""
    left = {"__pycache__", "build", ".pytest_cache"}
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
        and not left & set(path.parts)
        and not any(part.endswith(".egg-info") for part in path.parts)
    }


def test_the_toy_example_equals_the_rendered_templates():
    assert tree(TOY) == render("toy")


def test_the_toy_has_less_than_100_lines_of_python():
    files = [text for path, text in tree(TOY).items() if path.endswith(".py")]
    assert len(files) == 4
    assert sum(len(text.splitlines()) for text in files) < 100


def inl(folder, *words, path=()):
    places = [*map(str, path), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-m", "inl", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places), "INL_PLUGINS": ""},
    )


@pytest.mark.full
def test_a_new_package_passes_its_own_tests(tmp_path):
    done = inl(tmp_path, "new-plugin", "my_npu2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "inl check my_npu2:0" in done.stdout
    folder = tmp_path / "inl-my-npu2"
    assert tree(folder) == render("my_npu2")
    assert not any("toy" in text for text in tree(folder).values())
    places = [str(folder / "src"), *filter(None, sys.path)]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(places), "INL_PLUGINS": "inl_my_npu2.plugin"},
    )
    assert found.returncode == 0, found.stdout
    assert "skipped" not in found.stdout


def test_the_package_declares_its_entry_point():
    for name, package in (("npu", "inl-npu"), ("my_npu2", "inl-my-npu2")):
        files = render(name)
        project = tomllib.loads(files["pyproject.toml"])["project"]
        assert project["name"] == package
        assert project["entry-points"] == {GROUP: {name: f"inl_{name}.plugin"}}
        assert f"src/inl_{name}/plugin.py" in files


def test_the_license_is_chosen():
    for chosen, words in (
        ("Apache-2.0", "Apache License"),
        ("MIT", "Permission is hereby granted"),
    ):
        files = render("npu", chosen)
        project = tomllib.loads(files["pyproject.toml"])["project"]
        assert project["license"] == chosen
        assert words in files["LICENSE"]
    files = render("npu", "none")
    assert "license" not in tomllib.loads(files["pyproject.toml"])["project"]
    assert "LICENSE" not in files
    with pytest.raises(RequestError, match=r"found 'GPL', accepted: Apache-2.0, MIT"):
        render("npu", "GPL")


BAD = ["", "Npu", "my-npu", "1pu", "npu:0", "a.b", "../x", "npu_", "a__b", "auto",
       "n" * 33, "npü", "a b", "$name"]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_name_is_refused_before_writing(tmp_path, name):
    with pytest.raises(RequestError, match=r"^name: found .*accepted: lower-case"):
        create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_are_refused(name):
    with pytest.raises(RequestError, match="which is reserved"):
        render(name)


def test_an_existing_folder_is_not_changed(tmp_path):
    folder = tmp_path / "inl-npu"
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    done = inl(tmp_path, "new-plugin", "npu", "--path", str(tmp_path))
    assert done.returncode == 2
    assert "already exists; choose another name or --path" in done.stderr
    assert tree(folder) == {"mine.txt": "kept"}


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be created"):
        create("npu", tmp_path / "file" / "below")


def test_the_page_shows_the_traced_backend():
    page = (ROOT / "docs" / "writing-a-backend.md").read_text()
    _, _, rest = page.partition("`inl-lazy/src/inl_lazy/backend.py` is")
    shown = rest.partition("```python\n")[2].partition("```\n")[0]
    assert shown == render("lazy", style="traced")["src/inl_lazy/backend.py"]


def test_styles_differ_in_requirements_and_modules():
    for style, requirements, modules in (
        ("eager", {"inl-core", "numpy"}, {"plugin", "backend"}),
        ("traced", {"inl-core", "numpy", "jax"}, {"plugin", "backend", "kernels"}),
    ):
        files = render("npu", style=style)
        project = tomllib.loads(files["pyproject.toml"])["project"]
        assert {each.partition(">")[0] for each in project["dependencies"]} == (
            requirements
        )
        found = {Path(path).stem for path in files if path.startswith("src/inl_npu/")}
        assert found == modules | {"__init__"}
        for path, text in files.items():
            assert "$" not in text, path
            if path.endswith(".py"):
                compile(text, path, "exec")
    with pytest.raises(RequestError, match="'lazy', accepted: eager, traced"):
        render("npu", style="lazy")
