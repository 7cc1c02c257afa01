"""``inl completion``: scripts and candidates."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from inl.cli.app import COMMANDS
from inl.cli.completion import SCRIPTS, candidates, join_words
from inl.ops import __name__ as ops_module
from inl.spec.op import CATALOG

assert ops_module


def words(before, current):
    return [word for word, _ in candidates(before, current)]


def test_commands_complete_with_their_help():
    found = dict(candidates([], ""))
    assert list(found) == list(COMMANDS)
    assert all(found.values())
    assert words([], "comp") == ["completion"]
    assert words([], "--v") == ["--version"]


def test_options_of_a_command():
    found = dict(candidates(["chat"], "--"))
    assert {"--model", "--device", "--temperature", "--help"} <= set(found)
    assert found["--temperature"] == "Sampling temperature; 0 is greedy"
    assert words(["bench"], "--pro") == ["--prompt-tokens"]
    assert words(["completion"], "--at") == []  # the shells' own business


def test_values_of_an_option():
    assert words(["chat", "--device"], "ref") == ["reference:0"]
    assert words(["generate", "x", "--dtype"], "b") == ["bfloat16"]
    assert words(["chat", "--json"], "") == []


def test_values_of_an_argument():
    assert words(["completion"], "") == list(SCRIPTS)
    assert words(["ops"], "rms") == ["rms_norm"]
    assert set(words(["ops"], "")) == set(CATALOG)


@pytest.mark.parametrize(
    ("before", "current"),
    [(["nope"], ""), (["chat", "--model"], ""), (["chat", "--nope"], "x"), ([], "zz")],
)
def test_unknown_words_have_no_candidates(before, current):
    assert words(before, current) == []


@pytest.mark.parametrize(
    ("line", "joined", "kept"),
    [
        ("inl chat --device ref", "inl chat --device ref", ""),
        ("inl chat --device ref :", "inl chat --device ref:", "ref:"),
        ("inl chat --device ref : 0", "inl chat --device ref:0", "ref:"),
        ("inl chat --device ref : 0 --d", "inl chat --device ref:0 --d", ""),
        ("inl chat --device = ref", "inl chat --device ref", ""),
        ("inl chat --device = ref : 0", "inl chat --device ref:0", "ref:"),
        ("inl chat --device ref:0", "inl chat --device ref:0", ""),
    ],
)
def test_words_that_bash_splits_are_joined(line, joined, kept):
    assert join_words(line.split(" ")) == (joined.split(" "), kept)


def test_an_empty_word_after_a_separator():
    assert join_words(["inl", "chat", "--device", "="]) == (
        ["inl", "chat", "--device", ""],
        "",
    )
    begun = ["inl", "chat", "--device", "ref", ":", ""]
    assert join_words(begun)[0] == ["inl", "chat", "--device", "ref:", ""]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--device", "ref"], "reference:0\n"),
        (["--device", "reference", ":"], "0\n"),
        (["--device", "reference", ":", "0"], "0\n"),
        (["--device", "="], "auto\nreference:0\n"),
        (["--device", "=", "ref"], "reference:0\n"),
    ],
)
def test_bash_gets_the_rest_of_a_split_word(inl, words, lines):
    at = str(1 + len(words))
    done = inl("completion", "bash", "--at", at, "--", "inl", "chat", *words)
    assert done.stdout == lines


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "--temperature"),
        ("zsh", "--temperature:Sampling temperature; 0 is greedy"),
        ("fish", "--temperature\tSampling temperature; 0 is greedy"),
    ],
)
def test_format_per_shell(inl, shell, line):
    done = inl("completion", shell, "--at", "2", "--", "inl", "chat", "--temp")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{line}\n", "")


def test_colons_are_escaped_for_zsh(inl):
    words = ("inl", "chat", "--device", "ref")
    done = inl("completion", "zsh", "--at", "3", "--", *words)
    assert done.stdout == "reference\\:0\n"


def test_an_unknown_shell_is_refused(inl):
    done = inl("completion", "tcsh")
    assert done.returncode == 2
    assert "found 'tcsh', accepted: bash, zsh, fish" in done.stderr


SESSION = """
inl() {{ {python} -m inl "$@"; }}
source {script}
COMP_WORDS=({words})
COMP_CWORD={place}
_inl_complete
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p inl
"""


@pytest.mark.parametrize(
    ("typed", "place", "expected"),
    [
        ("inl ''", 1, list(COMMANDS)),
        ("inl co", 1, ["convert", "completion"]),
        ("inl quantize a b --kind q4", 5, ["q4_k_m", "q4_0"]),
        ("inl chat --temp --raw", 2, ["--temperature"]),
        ("inl chat --dtype fl", 3, ["float64", "float32", "float16"]),
        ("inl nope ''", 2, [""]),
    ],
)
def test_bash_completes_through_the_script(inl, tmp_path, typed, place, expected):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    script = tmp_path / "inl.bash"
    script.write_text(inl("completion", "bash").stdout)
    session = SESSION.format(
        python=sys.executable, script=script, words=typed, place=place
    )
    done = subprocess.run(
        [bash, "--norc", "-c", session], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""
    *found, registered = done.stdout.splitlines()
    assert found == expected
    assert "-F _inl_complete inl" in registered
