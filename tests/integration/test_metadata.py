"""Metadata of the packages, and the workflow that publishes them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = {
    path.parent.relative_to(ROOT).as_posix(): tomllib.loads(path.read_text("utf-8"))
    for pattern in ("core", "libs/*", "plugins/*")
    for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
}
HOST = "https://inl.example"
"""Of no repository; the release workflow replaces it."""
SYSTEMS = {"POSIX :: Linux", "MacOS", "Microsoft :: Windows", "OS Independent"}


@pytest.mark.parametrize("folder", PROJECTS)
def test_each_package_has_the_metadata_of_an_index(folder):
    project = PROJECTS[folder]["project"]
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    readme = (ROOT / folder / project["readme"]).read_text("utf-8")
    assert readme.startswith(f"# {project['name']}\n")
    assert 20 < len(project["description"]) < 120
    assert project["keywords"] == sorted(project["keywords"])
    classifiers = project["classifiers"]
    assert classifiers == sorted(set(classifiers))
    # An index refuses these beside a license expression.
    assert not any(each.startswith("License") for each in classifiers)
    given = {each.split(" :: ", 1)[1] for each in classifiers if "System" in each}
    assert given
    assert given <= SYSTEMS
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Typing :: Typed" in classifiers


@pytest.mark.parametrize("folder", PROJECTS)
def test_urls_lead_to_files_of_the_repository(folder):
    urls = PROJECTS[folder]["project"]["urls"]
    assert set(urls) >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert urls["Source"] == f"{HOST}/tree/main/{folder}"
    for name in ("Documentation", "Changelog"):
        path = urls[name].removeprefix(f"{HOST}/blob/main/")
        assert (ROOT / path).is_file(), urls[name]


def test_one_version():
    versions = {each["project"]["version"] for each in PROJECTS.values()}
    text = (ROOT / "core/src/inl/__init__.py").read_text("utf-8")
    assert versions == set(re.findall('__version__ = "(.*)"', text))


@pytest.mark.parametrize("folder", PROJECTS)
def test_classifiers_are_those_of_the_index(folder):
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(PROJECTS[folder]["project"]["classifiers"]) <= known


WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
ZIZMOR = shutil.which("zizmor", path=str(Path(sys.executable).parent))
PINNED = re.compile(r"[\w-]+/[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")


def test_the_release_is_built_for_the_systems_of_the_wheels():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]
    systems = jobs["native"]["strategy"]["matrix"]["system"]
    wheels = PROJECTS["plugins/inl-cpu"]["tool"]["cibuildwheel"]
    words = [each.partition("-")[0] for each in systems]
    assert words.count("ubuntu") == len(wheels["linux"]["archs"])
    assert words.count("macos") == len(wheels["macos"]["archs"])
    assert words.count("windows") == len(wheels["windows"]["archs"])
    assert jobs["test"]["strategy"]["matrix"]["system"] == systems
    assert set(jobs["test"]["needs"]) == {"native", "python"}
    assert jobs["publish"]["needs"] == ["test"]
    assert jobs["publish"]["environment"] == "pypi"
    writing = {name for name, job in jobs.items() if "write" in str(job["permissions"])}
    assert writing == {"publish"}


def test_actions_are_pinned_to_commits():
    uses = re.findall(r"uses: (.*)", WORKFLOW.read_text("utf-8"))
    assert len(uses) > 5
    assert [each for each in uses if not PINNED.fullmatch(each)] == []


@pytest.mark.skipif(ZIZMOR is None, reason="needs PyPI's zizmor")
def test_zizmor_accepts_the_workflow(tmp_path):
    command = [ZIZMOR, "--offline", "--quiet"]
    done = subprocess.run([*command, WORKFLOW], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    planted = tmp_path / "release.yml"
    text = WORKFLOW.read_text("utf-8")
    planted.write_text(text.replace("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4"))
    assert subprocess.run([*command, planted], capture_output=True).returncode


def test_a_release_has_the_urls_of_its_repository(tmp_path):
    for name in ("core", "libs", "plugins", "deploy"):
        for path in (ROOT / name).rglob("*"):
            if path.name in ("pyproject.toml", "set_urls.py"):
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    address = "https://example.org/acme/inl"
    words = [sys.executable, tmp_path / "deploy/set_urls.py", address]
    subprocess.run(words, check=True)
    for folder, before in PROJECTS.items():
        text = (tmp_path / folder / "pyproject.toml").read_text("utf-8")
        assert HOST not in text
        urls = before["project"]["urls"]
        wanted = {name: url.replace(HOST, address) for name, url in urls.items()}
        assert tomllib.loads(text)["project"] == before["project"] | {"urls": wanted}
