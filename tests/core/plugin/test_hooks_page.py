"""docs/hooks.md matches the hook specifications, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inl.plugin.check import hook_callers

PAGE = (Path(__file__).parents[3] / "docs" / "hooks.md").read_text()
HEADINGS = {line[3:] for line in PAGE.splitlines() if line.startswith("## inl_")}
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
HOOKS = {f"{hook.name}({', '.join(hook.spec.argnames)})" for hook in hook_callers()}


def test_the_contract_has_the_expected_hooks():
    assert {hook.partition("(")[0] for hook in HOOKS} == {
        "inl_register_backends",
        "inl_register_commands",
        "inl_register_drafters",
        "inl_register_formats",
        "inl_register_functions",
        "inl_register_kernels",
        "inl_register_models",
        "inl_register_places",
        "inl_register_routers",
        "inl_register_stores",
        "inl_register_transports",
    }


def test_every_hook_has_a_heading_and_every_heading_a_hook():
    assert HEADINGS == HOOKS


@pytest.mark.parametrize("hook", hook_callers(), ids=lambda hook: hook.name)
def test_every_hook_has_one_sentence(hook):
    sentence = hook.spec.function.__doc__
    assert sentence.endswith(".")
    assert "\n" not in sentence


SAYS = [
    "npu: plugin page",
    "kernels for cpu",
    "1 model name",
    "functions for acme",
    "place cluster",
    "format .acme",
    "drafter suffix_tree",
    "router by_device",
    "transport verbs",
    "store attic",
    "command fine-tune",
    "1 device",
]
CPU = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    register("cpu", "m:C")
"""


@pytest.mark.parametrize(("source", "says"), list(zip(EXAMPLES, SAYS, strict=True)))
def test_every_example_is_a_plugin(site, row_of, source, says):
    site.add("page", source)
    site.add("inl-cpu", CPU, entry="cpu")
    known = site.load()
    assert known.failed == ()
    assert row_of(known, "page").detail.startswith(says)
