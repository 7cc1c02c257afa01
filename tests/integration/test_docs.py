"""The pages of docs/: their examples run, and what they list is what there is."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from inl.cli.app import COMMANDS
from inl.cli.completion import command
from inl.engine.options import GenerationOptions

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
RUN_HERE = [
    "index.md",
    "checkpoints.md",
    "cli.md",
    "devices.md",
    "generating.md",
    "how-it-works.md",
    "inl.md",
    "migrating.md",
    "moe.md",
]
"""Pages whose python and console blocks are executed, in order."""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")


def text(page):
    return (DOCS / page).read_text("utf-8")


def blocks(page):
    """(language, block, the text block that follows it or None)."""
    found = FENCE.findall(text(page))
    after = [*found, ("", "")][1:]
    return [
        (language, body, following if kind == "text" else None)
        for (language, body), (kind, following) in zip(found, after, strict=True)
    ]


def fits(wanted, shown):
    """Compare as doctest does: ``...`` is anything."""
    parts = [re.escape(part) for part in wanted.strip().split("...")]
    return re.fullmatch(".*".join(parts), shown.strip(), re.DOTALL)


def test_the_comparison_can_fail():
    assert fits("a ... c\n", "a b\nb c")
    assert not fits("a ... c", "a b d")
    assert not fits("a", "a b")


@pytest.mark.parametrize("page", RUN_HERE)
def test_python_blocks_run_and_print_what_follows(page, capsys):
    names = {"__name__": "docs"}
    for language, body, expected in blocks(page):
        if language != "python":
            continue
        exec(compile(body, page, "exec"), names)
        shown = capsys.readouterr().out
        if expected is not None:
            assert fits(expected, shown), f"{page}: {shown!r} is not {expected!r}"


@pytest.fixture(scope="session")
def shell(tmp_path_factory):
    """Run a line in a shell that finds ``inl`` as this interpreter's."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "inl"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m inl "$@"\n')
    script.chmod(0o755)

    def run(line):
        return subprocess.run(
            ["/bin/sh", "-c", f'PATH="{folder}:$PATH"; {line}'],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=folder,
        )

    return run


def sessions(page):
    """(command, expected output) of every console block."""
    for language, body, _ in blocks(page):
        if language == "console":
            first, _, expected = body.partition("\n")
            assert first.startswith("$ "), f"{page}: a console block begins with $"
            yield first[2:], expected


SESSIONS = [(page, *each) for page in RUN_HERE for each in sessions(page)]


@pytest.mark.parametrize(
    ("page", "line", "expected"),
    SESSIONS,
    ids=[f"{s[0]}:{s[1][:24]}" for s in SESSIONS],
)
def test_console_blocks_run_and_show_what_they_show(shell, page, line, expected):
    done = shell(line)
    assert done.returncode == 0, done.stderr
    assert fits(expected, done.stdout), f"{page}: {done.stdout}"


def test_pages_with_examples_are_executed():
    """A page with a python or console block is run here, or by a test of its own."""
    elsewhere = {"hooks.md", "ops.md", "writing-a-backend.md"}
    with_examples = {
        page
        for page in PAGES
        if any(kind in ("python", "console") for kind, _, _ in blocks(page))
    }
    assert with_examples - elsewhere <= set(RUN_HERE)
    assert len(SESSIONS) > 5


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", text(page)):
            if "://" not in target:
                assert (DOCS / target).is_file(), f"{page}: {target}"


def test_the_navigation_names_every_page():
    named = re.findall(
        r": ([\w-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.M
    )
    assert sorted(named) == PAGES


def test_the_picture_is_an_svg_with_a_title():
    root = ET.parse(DOCS / "token.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert root.find(f"{space}title").text == "The life of one token"


def section(name):
    """What cli.md says of one command."""
    _, found, rest = f"\n{text('cli.md')}".partition(f"\n## inl {name}\n")
    assert found, f"cli.md has no heading '## inl {name}'"
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
    rows = re.findall(r"^\| (.+?) \| (.*?) \| (.+?) \|$", text("migrating.md"), re.M)
    return [row for row in rows if row[0] != "there"]


def resolves(name):
    """Whether ``inl.module.attribute`` can be had."""
    parts = name.partition("(")[0].split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@pytest.mark.parametrize("row", migrations(), ids=lambda row: row[0][:40])
def test_a_name_is_there_exactly_if_the_page_says_so(row):
    _, ours, state = row
    names = [name for name in SPAN.findall(ours) if name.startswith("inl.")]
    kind = re.split("[:;]", state)[0].split(" for ")[0]
    assert kind in ("works", "another way", "planned", "not planned")
    assert names or kind in ("planned", "not planned")
    for name in names:
        assert resolves(name) == (kind != "planned"), f"{name} is {kind}"
    for name in SPAN.findall(state):
        if name.startswith("inl.") and "(" not in name:
            assert resolves(name)


def test_all_names_of_the_systems_before_are_on_the_page():
    """The names that their own pages import or call."""
    page = text("migrating.md")
    for name in (
        *("inl_dynamics", "get_backend", "InferenceEngine", "EngineConfig"),
        *("apply_kernel_fusion", "quantize_for_inference", "get_optimal_parallelism"),
        *("TPUGEMMKernel", "TPUAttentionKernel", "TPULayerNormKernel"),
        *("tpu_custom_call", "compile_tpu_kernel", "is_tpu_available", "TPUBackend"),
        *("Device", "DeviceType", "Tensor", "matmul", "Sequential", "Linear", "ReLU"),
        *("flash_attention", "gemm", "layer_norm", "tpu_kernel", "gpu_kernel"),
        *("sparse_kernel", "expert_kernel", "moe_dispatch", "KernelConfig"),
        *("KernelError", "DeviceError", "profile_kernel", "register_tpu_op"),
    ):
        assert re.search(rf"\b{name}\b", page), name
