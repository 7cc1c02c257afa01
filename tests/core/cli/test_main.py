from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from inl import __version__
from inl.cli.app import COMMANDS, SUMMARIES
from inl.cli.main import main
from inl.install_command import install_command

RAISES = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_backends(register):
    pass

def run():
    {body}

from inl.cli import app
app.COMMANDS["fail"] = "fake_npu:run"
"""


def failing(plugin, body):
    """Environment in which the command ``fail`` runs ``body``."""
    env = plugin(RAISES.format(body=body))
    plugin("import fake_npu", "sitecustomize")
    return env


def test_the_version(inl):
    done = inl("--version")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"inl {__version__}\n",
        "",
    )


def test_the_help_page_names_every_command(inl):
    done = inl("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert "--debug" in done.stdout
    assert "..." not in done.stdout.replace("[ARGS]...", ""), "a summary is cut"


@pytest.mark.parametrize("name", COMMANDS)
def test_summaries_are_those_of_the_commands(name):
    module, _, function = COMMANDS[name].partition(":")
    text = getattr(import_module(module), function).__doc__
    assert SUMMARIES[name] == text.strip().splitlines()[0]


def test_the_help_page_imports_no_command():
    code = "from inl.cli.app import run; run(['--help'])"
    words = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    for target in COMMANDS.values():
        assert f" {target.partition(':')[0]}\n" not in done.stderr
    assert " inl.cli.app\n" in done.stderr
    assert "numpy" not in done.stderr


def test_without_a_command_the_help_is_shown(inl):
    done = inl()
    assert done.returncode == 0
    assert "Usage: inl" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("devcies",),
            "No such command 'devcies'. Did you mean 'devices'? (see inl --help)",
        ),
        (("run", "llama3.2"), "No such command 'run'; try inl chat --model MODEL"),
        (("devices", "--jsno"), "No such option: --jsno"),
        (("devices", "extra"), "unexpected extra argument"),
        (("check",), "Missing argument 'DEVICE' (see inl check --help)"),
        (("models", "--x"), "(see inl models --help)"),
        (("models", "x", "--prune"), "--prune takes no MODEL (see inl models --help)"),
    ],
)
def test_a_usage_error_exits_with_2(inl, words, sentence):
    done = inl(*words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("inl: ")
    assert sentence in line


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_usage_error_is_one_line_on_a_terminal_too(inl):
    import pty

    reader, writer = pty.openpty()
    options = {"stdout": writer, "stderr": writer, "check": False, "timeout": 300}
    words = [sys.executable, "-m", "inl", "devices", "--jsno"]
    assert subprocess.run(words, **options).returncode == 2
    os.close(writer)
    shown = os.read(reader, 65536)
    os.close(reader)
    assert shown.startswith(b"inl: No such option: --jsno")
    assert shown.count(b"\n") == 1


HELP_PAGES = """
import contextlib, io, sys
from inl.cli.app import COMMANDS
from inl.cli.main import main
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([name, "--help"]) == 0, name
print(*sys.modules)
"""
HEAVY = {"numpy", "inl.engine.inference_engine", "inl.ops", "inl.models"}
"""One of them alone takes a help page above 0.4 s of processor time."""


def test_the_help_pages_of_all_commands_import_nothing_heavy():
    words = [sys.executable, "-c", HELP_PAGES]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded >= {target.partition(":")[0] for target in COMMANDS.values()}
    assert not loaded & HEAVY
    # A page has 310 to 380, of which 200 are typer's and Python's own.
    assert len(loaded) < 600


def test_an_inl_error_prints_one_line_and_exits_with_2(inl, plugin):
    env = failing(
        plugin, "from inl.errors import PromptTooLong; raise PromptTooLong('9 > 8')"
    )
    done = inl("fail", env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "inl: PromptTooLong: 9 > 8\n"


def test_a_missing_package_prints_the_install_command(inl, plugin):
    body = "from inl.errors import MissingPackage; raise MissingPackage('try: pip ...')"
    done = inl("fail", env=failing(plugin, body))
    assert (done.returncode, done.stderr) == (2, "inl: try: pip ...\n")


def test_an_unexpected_error_prints_one_line_and_exits_with_1(inl, plugin):
    done = inl("fail", env=failing(plugin, "1 / 0"))
    assert done.returncode == 1
    assert done.stderr == (
        "inl: ZeroDivisionError: division by zero\n"
        "inl: run again with --debug for the traceback\n"
    )


@pytest.mark.parametrize("place", ["before", "after", "variable"])
def test_debug_shows_the_traceback(inl, plugin, place):
    env = failing(plugin, "1 / 0")
    words = {"before": ["--debug", "fail"], "after": ["fail", "--debug"]}
    if place == "variable":
        env = {**env, "INL_DEBUG": "1"}
    done = inl(*words.get(place, ["fail"]), env=env)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "in run" in done.stderr
    assert done.stderr.endswith("inl: ZeroDivisionError: division by zero\n")


def test_debug_after_a_bare_dash_dash_is_a_word(inl):
    done = inl("devices", "--", "--debug")
    assert done.returncode == 2
    assert "--debug" in done.stderr


def test_the_exit_code_of_a_command_is_returned(inl, plugin):
    done = inl("fail", env=failing(plugin, "raise SystemExit(7)"))
    assert (done.returncode, done.stderr) == (7, "")


def test_ctrl_c_exits_with_130(inl, plugin):
    done = inl("fail", env=failing(plugin, "raise KeyboardInterrupt"))
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_the_log_goes_to_stderr(inl, plugin):
    body = "import logging; logging.getLogger('inl').info('using cpu:0')"
    done = inl("fail", env=failing(plugin, body))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "inl: using cpu:0\n")


@pytest.mark.parametrize("body", ["print('x')", "print('x' * 10**6)"])
def test_a_closed_output_pipe_is_quiet(inl, plugin, body):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = inl("fail", env=failing(plugin, body), stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("body", ["print('x')", "print('x' * 10**6)"])
def test_a_full_disk_behind_the_output_is_a_sentence(inl, plugin, body):
    with Path("/dev/full").open("w") as full:
        done = inl("fail", env=failing(plugin, body), stdout=full)
    assert done.returncode == 1
    assert done.stderr == "inl: standard output: No space left on device\n"


def test_without_typer_there_is_an_instruction(inl, plugin):
    plugin("raise ModuleNotFoundError('no typer', name='typer')", "typer")
    done = inl("devices")
    assert done.returncode == 2
    assert done.stderr == (
        "inl: the command line needs typer and rich; try: "
        f"{install_command('inl-core[cli]')}\n"
    )


def test_a_command_is_imported_only_when_invoked(inl, plugin):
    plugin(
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n",
        "sitecustomize",
    )
    loaded = inl("plugins").stderr.split()
    assert "inl.cli.plugins" in loaded
    for other in ("devices", "generate", "explain"):
        assert f"inl.cli.{other}" not in loaded


def test_main_gives_the_exit_code(capsys):
    assert main(["--version"]) == 0
    assert main(["nope"]) == 2
    assert "No such command 'nope'" in capsys.readouterr().err


def test_the_script_is_main():
    project = Path(__file__).parents[3] / "core" / "pyproject.toml"
    scripts = tomllib.loads(project.read_text())["project"]["scripts"]
    assert scripts == {"inl": f"{main.__module__}:{main.__name__}"}


def test_an_import_error_inside_inl_is_not_a_missing_package(inl, plugin):
    plugin(
        "import sys\nsys.modules['inl.cli.app'] = None\n",
        "sitecustomize",
    )
    done = inl("devices")
    assert done.returncode == 1
    assert "inl.cli.app" in done.stderr
    assert sys.executable not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="the shell closes the streams")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [["ops"], ["devices"], ["bench", "--help"]])
def test_a_stream_may_be_closed(closed, words):
    line = f'exec "$0" -m inl "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_letters_that_an_output_cannot_encode_are_replaced(encoding):
    code = "from inl.cli import main; main._restore_streams(); print('a\\U0001f600b')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, b"a?b"), done.stderr
