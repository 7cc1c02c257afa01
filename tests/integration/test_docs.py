"""The documentation: examples run, links resolve, and lists match the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dotted_names import resolves
from inl.cli.app import COMMANDS
from inl.cli.app import import_command as command
from inl.engine.options import GenerationOptions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
DECISIONS = sorted(
    set((DOCS / "decisions").glob("*.md")) - {DOCS / "decisions/index.md"}
)
ALL_PAGES = sorted(
    path
    for folder in (
        ROOT,
        ROOT / "bench",
        ROOT / "core",
        *(ROOT / "libs").glob("*/"),
        *(ROOT / "plugins").glob("*/"),
        DOCS,
        DOCS / "decisions",
    )
    for path in folder.glob("*.md")
)
SOURCES = [
    ROOT / "core" / "src",
    *(ROOT / "libs").glob("*/src"),
    *(ROOT / "plugins").glob("*/src"),
]
RUN_HERE = [
    "index.md",
    "checkpoints.md",
    "cli.md",
    "concurrency.md",
    "devices.md",
    "directml.md",
    "engine-config.md",
    "from-neurenix.md",
    "from-tpu-inl.md",
    "from-vishwamai-functions.md",
    "from-vishwamai-kernels.md",
    "from-vishwamai-tpu.md",
    "generating.md",
    "how-it-works.md",
    "inl.md",
    "kernels.md",
    "migrating.md",
    "moe.md",
    "networks.md",
    "optimizers.md",
    "performance.md",
    "speculation.md",
    "structured-output.md",
]
"""Pages whose python and console blocks are executed here, in order."""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")


def text(page):
    return (DOCS / page).read_text("utf-8")


def blocks(page):
    """List (language, block, expected output from the text block after it or None)."""
    fences = FENCE.findall(text(page))
    following = [*fences, ("", "")][1:]
    return [
        (language, body, output if kind == "text" else None)
        for (language, body), (kind, output) in zip(fences, following, strict=True)
    ]


def matches(expected, output):
    """Compare like doctest with ELLIPSIS: ``...`` matches any text."""
    parts = [re.escape(part) for part in expected.strip().split("...")]
    return re.fullmatch(".*".join(parts), output.strip(), re.DOTALL)


def test_the_comparison_can_fail():
    assert matches("a ... c\n", "a b\nb c")
    assert not matches("a ... c", "a b d")
    assert not matches("a", "a b")


@pytest.mark.parametrize("page", RUN_HERE)
def test_python_blocks_run_and_print_the_expected_output(page, capsys):
    names = {"__name__": "docs"}
    for language, body, expected in blocks(page):
        if language != "python":
            continue
        exec(compile(body, page, "exec"), names)
        output = capsys.readouterr().out
        if expected is not None:
            assert matches(expected, output), f"{page}: {output!r} is not {expected!r}"


def test_the_python_example_of_the_readme_runs(capsys):
    page = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    names["engine"].close()
    assert "Paris" in capsys.readouterr().out


@pytest.fixture(scope="session")
def shell(tmp_path_factory):
    """Run a shell command with ``inl`` of this interpreter on the path."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "inl"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m inl "$@"\n')
    script.chmod(0o755)

    def run(line):
        return subprocess.run(
            ["/bin/sh", "-c", f'PATH="{folder}:$PATH"; {line}'],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
        )

    return run


def sessions(page):
    """Yield (command, expected output) of every console block."""
    for language, body, _ in blocks(page):
        if language == "console":
            first, _, expected = body.partition("\n")
            assert first.startswith("$ "), f"{page}: a console block starts with $"
            yield first[2:], expected


SESSIONS = [(page, *each) for page in RUN_HERE for each in sessions(page)]


@pytest.mark.parametrize(
    ("page", "line", "expected"),
    SESSIONS,
    ids=[f"{s[0]}:{s[1][:24]}" for s in SESSIONS],
)
def test_console_blocks_print_the_expected_output(shell, page, line, expected):
    done = shell(line)
    assert done.returncode == 0, done.stderr
    assert matches(expected, done.stdout), f"{page}: {done.stdout}"


def test_pages_with_examples_are_executed():
    """Every page with python or console blocks is executed by some test."""
    # Docstrings' examples in python-api.md have no models of their own.
    elsewhere = {"hooks.md", "ops.md", "python-api.md", "writing-a-backend.md"}
    with_examples = {
        page
        for page in PAGES
        if any(kind in ("python", "console") for kind, _, _ in blocks(page))
    }
    assert with_examples - elsewhere <= set(RUN_HERE)
    assert len(SESSIONS) > 5


def anchors(page):
    """Return the anchors of a page's headings, as mkdocs makes them."""
    lines = re.findall(r"^#+ (.+)$", FENCE.sub("", page), re.M)
    words = (re.sub(r"[^\w\s-]", "", line).strip().lower() for line in lines)
    return [re.sub(r"[-\s]+", "-", each) for each in words]


def broken_links(path, page):
    """List the relative links of a page without a file, or without the anchor."""
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", page):
        if "://" in target:
            continue
        file = path.parent / target if target else path
        if not file.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(file.read_text("utf-8")):
            broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("path", ALL_PAGES, ids=lambda path: path.name)
def test_relative_links_resolve(path):
    assert broken_links(path, path.read_text("utf-8")) == []


def test_a_broken_link_is_found():
    page = "[a](ops.md#linear) [b](no.md) [c](ops.md#no) [d](index.md) [e](#no)"
    found = broken_links(DOCS / "index.md", page)
    assert found == ["no.md", "ops.md#no", "#no"]


def test_the_navigation_lists_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/-]+\.md)$", nav, re.M)
    assert sorted(listed) == sorted([*PAGES, "decisions/index.md"])


@pytest.mark.parametrize(
    ("picture", "title"),
    [
        ("token.svg", "The life of one token"),
        ("architecture.svg", "The architecture of INL"),
    ],
)
def test_pictures_are_svg_with_a_title(picture, title):
    root = ET.parse(DOCS / picture).getroot()
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    assert root.find(f"{namespace}title").text == title


def test_the_index_of_decisions_lists_every_page():
    rows = re.findall(
        r"^\| \[(.+)\]\(([\w-]+\.md)\) \| .+ \|$", text("decisions/index.md"), re.M
    )
    assert sorted(name for _, name in rows) == [page.name for page in DECISIONS]
    for title, name in rows:
        assert text(f"decisions/{name}").startswith(f"# {title}\n")


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_can_be_linked_and_has_a_text(page):
    content = page.read_text()
    found = anchors(content)
    assert len(set(found)) == len(found)
    for section in re.split(r"^## .+$", content, flags=re.M)[1:]:
        assert section.strip()


def source_exists(path):
    """Whether a file or folder exists below a source root or below ``inl``."""
    roots = [ROOT, *SOURCES, ROOT / "core" / "src" / "inl"]
    return any((root / path).exists() for root in roots)


def test_files_named_in_the_architecture_exist():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`([\w/-]+(?:/|\.(?:py|md|toml)))`", page)
    assert len(paths) > 40
    assert [path for path in paths if not source_exists(path)] == []


def test_modules_named_in_decisions_exist():
    names = {
        name
        for page in DECISIONS
        for name in re.findall(r"`(inl\w*(?:\.[a-z_]+)+)`", page.read_text())
    }
    assert len(names) > 5
    for name in names:
        path = name.replace(".", "/")
        assert source_exists(path) or source_exists(f"{path}.py"), name


def section(name):
    """Return the section of cli.md on one command."""
    _, heading, rest = f"\n{text('cli.md')}".partition(f"\n## inl {name}\n")
    assert heading, f"cli.md has no heading '## inl {name}'"
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_on_the_page(name):
    wanted = {
        max(param.opts, key=len)
        if param.param_type_name == "option"
        else param.name.upper()
        for param in command(name).params
        if not getattr(param, "hidden", False)
    }
    rows = re.findall(r"^\| `([^ `]+)[^`]*` \|", section(name), re.MULTILINE)
    assert set(rows) == wanted
    assert len(rows) == len(wanted)


def test_no_other_command_is_on_the_page():
    assert re.findall(r"^## inl (\S+)$", text("cli.md"), re.M) == list(COMMANDS)


def test_every_sampling_option_is_on_the_page():
    table = text("generating.md").partition("## Sampling")[2].partition("```")[0]
    named = {name for row in table.splitlines() for name in SPAN.findall(row[:60])}
    assert set(GenerationOptions.__annotations__) <= named


def migrations():
    rows = re.findall(r"^\| (.+?) \| ?(.*?) \| (.+?) \|$", text("migrating.md"), re.M)
    return [row for row in rows if row[0] != "name"]


@pytest.mark.parametrize("row", migrations(), ids=lambda row: row[0][:40])
def test_the_state_of_a_migrated_name_is_correct(row):
    _, ours, state = row
    names = [name for name in SPAN.findall(ours) if name.startswith("inl.")]
    kind = re.split("[:;]", state)[0].split(" for ")[0]
    assert kind in ("works", "differs", "refused")
    assert names or kind == "refused"
    for name in names:
        assert resolves(name), name
    for name in SPAN.findall(state):
        if name.startswith("inl.") and "(" not in name:
            assert resolves(name)


def test_files_that_the_makefile_names_exist():
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "Makefile").read_text("utf-8"))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


def commands(page):
    """Yield the words of each ``inl`` command in the blocks of a page."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    for language, body in fences:
        if language not in ("", "sh", "console"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ |\.venv/bin/)?inl ([a-z].*)", line)
            if not found:
                continue
            words = shlex.split(found[1], comments=True)
            end = next((i for i, word in enumerate(words) if word in "|<>&;"), None)
            yield words[:end]


def parse(words):
    """Parse a command and its options; raises a usage error of click."""
    name, *rest = words
    if name == "bench" and rest[:1] in (["mix"], ["serve"]):
        name, rest = f"bench-{rest[0]}", rest[1:]
    command(name).make_context(name, rest)


WRITTEN = [
    (path, words) for path in ALL_PAGES for words in commands(path.read_text("utf-8"))
]


@pytest.mark.parametrize(
    ("path", "words"), WRITTEN, ids=[f"{p.name}: {' '.join(w)}" for p, w in WRITTEN]
)
def test_a_written_command_has_these_options(path, words):
    parse(words)


def test_an_unknown_option_is_found():
    assert len(WRITTEN) > 50
    (words,) = commands("```sh\ninl serve MODEL --max-bach 3 &  # a server\n```\n")
    with pytest.raises(Exception, match="No such option: --max-bach"):
        parse(words)
