"""Commands that plugins add to ``inl``."""

from __future__ import annotations

import pytest

GREET = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_commands(register):
    register("greet", "greeting:run", "Greet NAME.")
    register("absent-minded", "nowhere_at_all:run", "Run what is not there.")
    register("unfit", "greeting:unfit", "Take what no line has.")
    register("no-function", "greeting:NUMBER", "Be a number.")
"""
RUN = """
import sys

NUMBER = 7

def run(name: str, loud: bool = False) -> None:
    \"\"\"Greet NAME, as a friend.\"\"\"
    if name == "nobody":
        raise LookupError("nobody is here")
    print("HELLO" if loud else "hello", name)

def unfit(what: str | int) -> None:
    pass
"""


@pytest.fixture
def greet(plugin):
    plugin(RUN, "greeting")
    return plugin(GREET, "acme_plugin")


def test_a_command_runs_with_its_options(inl, greet):
    done = inl("greet", "Ada", "--loud", env=greet)
    assert (done.returncode, done.stdout, done.stderr) == (0, "HELLO Ada\n", "")
    done = inl("greet", "--help", env=greet)
    assert "Greet NAME, as a friend." in done.stdout
    assert "--loud" in done.stdout


def test_the_help_page_names_commands_under_their_package(inl, greet):
    page = inl("--help", env=greet).stdout
    _, _, section = page.partition("\nCommands of INL_PLUGINS:\n")
    rows = [line.split(None, 1) for line in section.splitlines()]
    assert ["greet", "Greet NAME."] in rows
    assert "greet" not in inl("--help").stdout


def test_the_help_page_imports_no_command_of_a_plugin(inl, greet, tmp_path):
    """Nor, once it was tested, the plugin."""
    inl("--help", env=greet)
    (tmp_path / "usercustomize.py").touch()
    done = inl("--help", env=greet | {"PYTHONPROFILEIMPORTTIME": "1"})
    assert " inl.cli.app\n" in done.stderr
    assert "greeting" not in done.stderr
    assert "acme_plugin" not in done.stderr


def test_near_names_are_suggested(inl, greet):
    done = inl("gret", env=greet)
    assert done.returncode == 2
    assert "No such command 'gret'. Did you mean 'greet'?" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["greet", "nobody"], 1, "LookupError: nobody is here"),
        (["greet"], 2, "Missing argument 'NAME' (see inl greet --help)"),
        (["absent-minded"], 2, "cannot load command absent-minded, nowhere_at_all:run"),
        (["unfit"], 2, "command unfit: AssertionError: Typer"),
        (["no-function"], 2, "greeting:NUMBER: found int, accepted: a function"),
    ],
)
def test_what_fails_is_a_sentence(inl, greet, words, code, sentence):
    done = inl(*words, env=greet)
    assert done.returncode == code
    assert sentence in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    "source", ["1 / 0", "import os; os._exit(3)", "raise SystemExit", "def ("]
)
def test_a_broken_plugin_costs_the_help_page_nothing(inl, plugin, source):
    env = plugin(source, "broken_plugin")
    done = inl("--help", env=env)
    assert done.returncode == 0
    assert "\n  generate " in done.stdout
    assert "Commands of" not in done.stdout


def test_a_command_of_the_core_stays_the_cores(inl, plugin):
    env = plugin(GREET.replace('"greet"', '"devices"'), "acme_plugin")
    assert "Commands of" not in inl("--help", env=env).stdout
    assert "already registered by plugin reference" in inl("plugins", env=env).stdout


def test_completion_knows_them(inl, greet):
    done = inl("completion", "bash", "--at", "1", "--", "inl", "gre", env=greet)
    assert done.stdout.split() == ["greet"]
    line = ["--", "inl", "greet", "--lo"]
    done = inl("completion", "bash", "--at", "2", *line, env=greet)
    assert done.stdout.split() == ["--loud"]
