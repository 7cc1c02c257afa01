"""Commands of the documentation that install packages of INL."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inl.install_command import FOLDERS, LIBRARIES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "core/*.md", "libs/*/*.md", "plugins/*/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
COMMAND = re.compile(r"(?:[\w.]*/)*pip install ([^`#\n]*[^`#\n ])")
RECORDED = {
    "wheels": ("inl-core[cli]", "inl-cpu", "--find-links"),
    "source": ("core[cli]", "plugins/inl-cpu", "-e"),
    "gpu": ("inl-core[cli]", "inl-cuda", "--find-links"),
}
"""Words of the command that installs INL in each kind of recording."""

NAMES = {folder: name for name, folder in FOLDERS.items()}


def commands():
    """Page, and the words after ``pip install``, of each command with INL in it."""
    for path in PAGES:
        for text in COMMAND.findall(path.read_text("utf-8")):
            words = shlex.split(text)
            # ./inl-NAME was made by a command before: inl new-plugin.
            known = any(re.search(r"inl-|core", word) for word in words)
            if known and not words[0].startswith("./inl-"):
                yield path.relative_to(ROOT).as_posix(), tuple(words)


COMMANDS = sorted(set(commands()))


def requirements(words):
    """Names with extras of the packages of a command, of a folder or an index."""
    for word in words:
        folder, bracket, extras = word.removeprefix("./").partition("[")
        if folder in NAMES:
            yield NAMES[folder] + bracket + extras
        elif folder in FOLDERS:
            yield word


def test_the_pages_of_each_backend_have_commands():
    pages = {page for page, _ in COMMANDS}
    assert {"README.md", "docs/install.md", "docs/index.md"} <= pages
    readme = [words for page, words in COMMANDS if page == "README.md"]
    assert ("./core[cli]", "./libs/inl-torch", "./plugins/inl-cuda") in readme
    for name in NAMES.values():
        assert any(
            need.partition("[")[0] == name
            for page, words in COMMANDS
            if page == "docs/install.md"
            for need in requirements(words)
        ), name


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_a_command_has_what_pip_does_not_find(page, words):
    """No index has the packages: by name they need a folder of wheels."""
    found = set(requirements(words))
    assert found, "a package of another name?"
    bare = {need.partition("[")[0] for need in found}
    for need in found:
        name, _, extras = need.partition("[")
        file = ROOT / FOLDERS[name] / "pyproject.toml"
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        known = set(project.get("optional-dependencies", {}))
        assert set(filter(None, extras.rstrip("]").split(","))) <= known
        keys = {name, *(f"{name}[{each}]" for each in extras.rstrip("]").split(","))}
        libraries = {each for key in keys for each in LIBRARIES.get(key, ())}
        by_name = name in {word.partition("[")[0] for word in words}
        if by_name:
            # One line of the page says what works after the first release.
            released = ("docs/install.md", ("inl-core[cli]", "inl-cpu"))
            assert (page, words) == released or words[:2] == ("--find-links", "dist")
        else:
            assert libraries <= bare, f"no index has {libraries - bare}"


TRIED = {words for page, words in COMMANDS if page in ("README.md", "docs/install.md")}


@pytest.mark.long
@pytest.mark.parametrize("words", sorted(TRIED), ids=" ".join)
def test_pip_accepts_the_command(words, tmp_path):
    """Minutes each: what torch, JAX and others need is resolved, but not installed."""
    if "dist" in words or not any("/" in word for word in words):
        pytest.skip("installs wheels: see test_wheels")
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    pip = [tmp_path / "bin" / "python", "-m", "pip", "install", "--dry-run", "-q"]
    done = subprocess.run([*pip, *words], cwd=ROOT, capture_output=True, text=True)
    if "onnxruntime-directml" in done.stderr and sys.platform != "win32":
        pytest.skip("onnxruntime-directml is for Windows")
    assert done.returncode == 0, done.stderr


def test_recordings_run_the_commands_of_the_pages(tmp_path):
    record = runpy.run_path(str(ROOT / "deploy" / "record.py"))
    made = {kind: list(record["commands"](kind, tmp_path)) for kind in RECORDED}
    for kind, words in RECORDED.items():
        assert any(set(words) <= set(shlex.split(line)) for line in made[kind]), kind
        assert any(" generate " in line for line in made[kind])
    assert any("--device cuda:0" in line for line in made["gpu"])


def test_a_recording_without_an_index_sees_what_is_installed(tmp_path):
    record = runpy.run_path(str(ROOT / "deploy" / "record.py"))
    dist, model, beside = tmp_path / "dist", "a b.gguf", tmp_path / "packages"
    beside.mkdir()
    (beside / "torch_of_the_machine.py").write_text("NAME = 'this one'\n")
    made = list(record["commands"]("gpu", dist, model, beside))
    assert any("--model 'a b.gguf' --device cuda:0" in line for line in made)
    for line in (f"{made[0]} --without-pip", made[1]):
        subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    code = "import torch_of_the_machine; print(torch_of_the_machine.NAME)"
    words = [tmp_path / ".venv/bin/python", "-c", code]
    assert subprocess.check_output(words, text=True) == "this one\n"


def test_a_recording_without_a_compiler_has_none(tmp_path, monkeypatch):
    record = runpy.run_path(str(ROOT / "deploy" / "record.py"))
    programs = tmp_path / "programs"
    programs.mkdir()
    compilers = ("cc", "g++-12", "x86_64-linux-gnu-gcc", "clang++", "c++", "zig")
    for name in (*compilers, "sh", "python3", "gccgo-tools", "ccache-stats"):
        (programs / name).touch()
    monkeypatch.setenv("PATH", str(programs))
    found = Path(record["without_compilers"](tmp_path / "links"))
    assert sorted(path.name for path in found.iterdir()) == [
        "ccache-stats", "gccgo-tools", "python3", "sh",
    ]  # fmt: skip
