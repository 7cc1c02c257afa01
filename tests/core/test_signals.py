"""SIGINT where the parent ignores it: nohup, and background jobs of scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="no inherited signal dispositions"
)


IGNORE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run_ignoring(*arguments):
    """Run Python as a process that ignores SIGINT from its start."""
    return subprocess.run(
        [sys.executable, "-c", IGNORE, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


ENDLESS = """
import signal
from inl.errors import TemplateError
from inl.text.template import ChatTemplate

assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
try:
    ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}"
                 "{% endfor %}{% endfor %}").apply([])
except TemplateError as error:
    print(error)
"""


def test_templates_have_their_time_limit():
    done = run_ignoring("-c", ENDLESS)
    assert done.returncode == 0, done.stderr
    assert "longer than 1.5 seconds" in done.stdout


@pytest.mark.full
def test_tests_of_ctrl_c_pass():
    done = run_ignoring(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        str(CORE / "cli" / "test_chat.py"),
        str(CORE / "cli" / "test_chat_terminal.py"),
        *("-k", "ctrl_c or hangs"),
    )
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
